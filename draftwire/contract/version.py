"""Versions that both sides of a stream compare."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("draftwire")
except PackageNotFoundError:  # run from a source tree
    VERSION = "0.0.0+source"

# Raised when the meaning of a message in draft.proto changes.
PROTOCOL_VERSION = 7
