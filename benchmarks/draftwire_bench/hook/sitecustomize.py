"""Python imports this module at startup; it instruments the process for `draftwire_bench.timeline`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import recorder  # type: ignore[import-not-found]  # in this directory, which is on the path


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual and calls a module's wrapper after loading."""

    def __init__(self, wrappers: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._wrappers = wrappers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module to wrap; None for other modules."""
        is_known = fullname in self._wrappers
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if is_known else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            self._wrappers[fullname](module)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


if "DRAFTWIRE_TIMELINE" in os.environ:
    sys.meta_path.insert(0, Finder(recorder.wrappers(Path(os.environ["DRAFTWIRE_TIMELINE"]))))
