"""Python imports this module when it starts: it records calls of the process, for `benchmarks.timeline`."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from calls import CALLS  # type: ignore[import-not-found]  # beside this file, which is on the path

RECORD = struct.Struct("<qqq")  # number of the call, monotonic time of its begin and its end in ns
MOST_RECORDS = 1 << 20
NAMES = [name for names in CALLS.values() for name in names]
# What calls the same methods without being on any step's way.
PRACTICE = "draftwire.practice"


class Recorder:
    """Records in a file that outlives the process however that ends: the count, then the records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: mmap.mmap | None = None
        self._pid = 0
        self._count = 0
        self._thread = threading.local()

    def leave_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, during which its thread records nothing."""

        @functools.wraps(call)
        def left_out(*args: Any, **kwargs: Any) -> Any:
            self._thread.is_left_out = True
            try:
                return call(*args, **kwargs)
            finally:
                self._thread.is_left_out = False

        return left_out

    def add(self, number: int, begin: int, end: int) -> None:
        """Adds a record; those past the last place are lost."""
        if getattr(self._thread, "is_left_out", False):
            return
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
            file.truncate(8 + MOST_RECORDS * RECORD.size)  # takes room on the disk when it is written
            self._file = mmap.mmap(file.fileno(), 0)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `CALLS` as they are and wraps their methods once they are loaded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, or None for the other finders."""
        is_known = fullname in CALLS or fullname == PRACTICE
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if is_known else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            if fullname == PRACTICE:
                one: Any = module
                one.Practice.go_on = self._recorder.leave_out(one.Practice.go_on)
                one.rehearse_with = self._recorder.leave_out(one.rehearse_with)
            for name in CALLS.get(fullname, ()):
                owner, method = name.split(".")
                kind = getattr(module, owner)
                setattr(kind, method, self._recorded(getattr(kind, method), NAMES.index(name)))

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec

    def _recorded(self, call: Callable[..., Any], number: int) -> Callable[..., Any]:
        add, now = self._recorder.add, time.monotonic_ns

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return call(*args, **kwargs)
            finally:
                add(number, begin, now())

        return recorded


sys.meta_path.insert(0, Finder(Recorder(Path(os.environ["DRAFTWIRE_TIMELINE"]))))
