"""Keeps a thread's code at its processor's hand while it waits.

A thread that has looked for messages for some milliseconds takes about two to four times as long for what it does then
as one that has just done it: the processor has neither the code nor its data near any more. So shortly before something
is due the engines' threads go through it on a stand-in. `python -m benchmarks.host_path` shows both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

# It begins so long before something is due; it takes a third of that to a half, seldom more.
BEFORE_S = 1.2e-3
# Before a step of more sequences it is not gone through: most of what that takes goes sequence after sequence, and with
# 32 of them the rehearsal of one gained nothing.
MOST_SEQUENCES = 4


class Rehearsal(Protocol):
    """A stand-in for an engine."""

    def prepare(self) -> None:
        """Makes what `run` takes."""

    def run(self) -> list[float]:
        """Does what the engine's thread does with it. Monotonic times of the begin and of the end of each part."""


def rehearse_with(make: Callable[[], Rehearsal]) -> Rehearsal | None:
    """What `make` makes, gone through once, for the first time takes long; None where that cannot be: it is of no other
    use."""
    try:
        rehearsal = make()
        rehearsal.prepare()
        rehearsal.run()
    except Exception as error:
        logger.warning("there are no rehearsals: %s", error)
        return None
    return rehearsal


class Practice:
    """Goes through a rehearsal when the next of even events is about to come. Used by one thread.

    Attributes
    ----------
    due
        Monotonic time at which to go through it; infinite when none is due before the next event.
    """

    def __init__(self, rehearsal: Rehearsal | None, longest_s: float) -> None:
        """No event is expected after more than `longest_s`; without a rehearsal none is at all."""
        self._rehearsal = rehearsal
        self._longest_s = longest_s if rehearsal is not None else 0.0
        self._last = -math.inf
        self._period = math.inf
        self.due = math.inf

    def note(self, now: float) -> None:
        """An event came. If the last ones were evenly apart, so is the next expected to be."""
        period, last_period = now - self._last, self._period
        self._last, self._period = now, period
        is_even = abs(period - last_period) < BEFORE_S / 2
        self.due = now + period - BEFORE_S if is_even and BEFORE_S < period <= self._longest_s else math.inf

    def is_due(self, now: float) -> bool:
        """Whether to go through it now; not any more when the event may come before it has been done."""
        return self.due <= now < self.due + BEFORE_S / 4

    def go(self) -> None:
        """Goes through it. A rehearsal that fails is the last one: nobody waits for it."""
        self.due = math.inf
        try:
            if self._rehearsal is not None:
                self._rehearsal.prepare()
                self._rehearsal.run()
        except Exception:
            logger.exception("there are no rehearsals any more")
            self._rehearsal, self._longest_s = None, 0.0
