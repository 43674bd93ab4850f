"""Records calls in a process, for `draftwire_bench.timeline`."""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from calls import CALLS  # type: ignore[import-not-found]  # in this directory, which is on the path

RECORD = struct.Struct("<qqq")  # number of the call, monotonic times of its begin and end in ns
MOST_RECORDS = 1 << 20
NAMES = [name for names in CALLS.values() for name in names]


class Recorder:
    """Records in a mapped file, which survives a killed process: the count, then the records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: mmap.mmap | None = None
        self._pid = 0
        self._count = 0

    def add(self, number: int, begin: int, end: int) -> None:
        """Add a record; records after MOST_RECORDS are dropped."""
        if self._file is None or self._pid != os.getpid():
            self._open()
        assert self._file is not None
        if self._count < MOST_RECORDS:
            RECORD.pack_into(self._file, 8 + self._count * RECORD.size, number, begin, end)
            self._count += 1
            struct.pack_into("<q", self._file, 0, self._count)

    def _open(self) -> None:
        self._pid, self._count = os.getpid(), 0
        with (self._directory / f"{self._pid}.records").open("w+b") as file:
            file.truncate(8 + MOST_RECORDS * RECORD.size)  # a sparse file
            self._file = mmap.mmap(file.fileno(), 0)


def wrappers(directory: Path) -> dict[str, Callable[[ModuleType], None]]:
    """Return by module a function that makes the module's methods in `CALLS` record their calls in `directory`."""
    recorder = Recorder(directory)
    return {module: functools.partial(_wrap, recorder, names) for module, names in CALLS.items()}


def _wrap(recorder: Recorder, names: Sequence[str], module: ModuleType) -> None:
    for name in names:
        owner, method = name.split(".")
        kind = getattr(module, owner)
        setattr(kind, method, _recorded(recorder, NAMES.index(name), getattr(kind, method)))


def _recorded(recorder: Recorder, number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    add, now = recorder.add, time.monotonic_ns

    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        begin = now()
        try:
            return call(*args, **kwargs)
        finally:
            add(number, begin, now())

    return recorded
