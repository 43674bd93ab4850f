"""The open files of this process."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


def open_files() -> Counter[str]:
    """Count the open files of this process by name, after a garbage collection.

    Threads of earlier tests may close files at any time, so tests check `open_files() - before`.
    """
    gc.collect()
    names: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names[os.readlink(fd)] += 1
    return names
