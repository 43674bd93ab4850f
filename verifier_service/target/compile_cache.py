"""The cache of compiled code between starts."""

from __future__ import annotations

import os
from pathlib import Path


def use_compile_cache(directory: str | None = None) -> None:
    """Store compiled code of torch in `directory`, for later starts. Call before the first compilation.

    The default is `draftwire/compile` in the user's cache directory, because torch's default is the temporary
    directory, which may not survive a reboot. $TORCHINDUCTOR_CACHE_DIR is not read here, because torch sets it when it
    is imported.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory or str(user_cache / "draftwire" / "compile")
