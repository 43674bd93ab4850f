"""Replaces methods of a module as it is imported, for whatever watches a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Call = Callable[..., Any]


def wrapping(wrappers: Mapping[str, Callable[[Call], Call]]) -> Callable[[ModuleType], None]:
    """Return a function that replaces each `Class.method` of a module by its wrapper's result."""

    def wrap(module: ModuleType) -> None:
        for name, wrapper in wrappers.items():
            owner, method = name.split(".")
            kind = getattr(module, owner)
            setattr(kind, method, wrapper(getattr(kind, method)))

    return wrap
