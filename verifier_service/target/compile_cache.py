"""Where compiled code is kept between starts."""

from __future__ import annotations

import os
from pathlib import Path


def use_compile_cache(directory: str | None = None) -> None:
    """Keep what torch compiles in `directory` for the starts to come; call it before the first compilation.

    By default that is `draftwire/compile` in the user's cache directory: torch's own place is the temporary directory,
    which may not outlive the machine's next start. What $TORCHINDUCTOR_CACHE_DIR says is not asked here: torch sets it
    itself when it is imported.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory or str(user_cache / "draftwire" / "compile")
