"""Versions that both sides of a stream compare."""

from importlib.metadata import PackageNotFoundError, version


def _installed_version() -> str:
    """Return the version of `draftwire` or of `draftwire-client`, whose files are the same where both are installed.

    Raises:
        ImportError: If both are installed in different versions: one of them has overwritten files of the other.
    """
    found = {}
    for name in ("draftwire", "draftwire-client"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if len(set(found.values())) > 1:
        given = " and ".join(f"{name} {number}" for name, number in found.items())
        raise ImportError(f"{given} share files: install both in one version, or draftwire alone, which has the client")
    return next(iter(found.values()), "0.0.0+source")


VERSION = _installed_version()

# Incremented when the meaning of a message in draft.proto changes.
PROTOCOL_VERSION = 7
