"""Wraps methods of a module when the module is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Call = Callable[..., Any]


def wrapping(wrappers: Mapping[str, Callable[[Call], Call]]) -> Callable[[ModuleType], None]:
    """Return a function that replaces each `Class.method` of a module with its wrapper's result."""

    def wrap(module: ModuleType) -> None:
        for name, wrapper in wrappers.items():
            owner, method = name.split(".")
            kind = getattr(module, owner)
            setattr(kind, method, wrapper(getattr(kind, method)))

    return wrap
