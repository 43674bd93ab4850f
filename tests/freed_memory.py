"""Memory of services under test: the part that is in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

LEAST_BYTES = 1 << 20


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Let processes that start in this context return freed blocks of LEAST_BYTES or more to the system at once.

    By default glibc raises this limit with each large block that is freed, and keeps freed blocks in the arenas of the
    threads. The arenas grow one after another, as if memory leaked.
    """
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": str(LEAST_BYTES)}):
        yield
