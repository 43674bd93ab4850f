"""Polling for a condition with a long timeout, so that no test depends on speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def wait_for(condition: Callable[[], object], what: str = "the condition holds", seconds: float = PATIENCE_S) -> None:
    """Poll until `condition` holds.

    Raises
    ------
    AssertionError
        The condition does not hold within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
