"""What this process has open."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


def open_files() -> Counter[str]:
    """What its file descriptors are of, without those that wait for the collector of garbage. Threads of earlier tests
    may close some of theirs at any time: what is left behind is `open_files() - before`.
    """
    gc.collect()
    names: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names[os.readlink(fd)] += 1
    return names
