"""Keeps a thread's code at its processor's hand while it waits.

A thread that has looked for messages for a millisecond takes two to four times as long for what it does then as one
that has just done it: the processor has neither the code nor its data near any more. So shortly before something is due
the engines' threads go through it on a stand-in, again and again, in pieces between which they look whether it has
come. `python -m benchmarks.host_path` shows the difference.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

logger = logging.getLogger(__name__)

# It begins so long before something is due, and ends a moment before it, lest that comes in the middle of a piece.
BEFORE_S, QUIET_S = 1.2e-3, 0.15e-3
LOOK_EVERY_S = 50e-6  # whether it has come, before that
_NO_PIECE = object()


class Rehearsal(Protocol):
    """A stand-in for an engine."""

    def prepare(self) -> None:
        """Makes what `run` takes."""

    def run(self) -> Iterator[float | None]:
        """Does what the engine's thread does with it, piece by piece. Yields monotonic times: of the begin, and of the
        end of each part; None after pieces that are of no part."""


def rehearse_with(make: Callable[[], Rehearsal]) -> Rehearsal | None:
    """What `make` makes, gone through once, for the first time takes long; None where that cannot be: it is of no other
    use."""
    try:
        rehearsal = make()
        rehearsal.prepare()
        for _ in rehearsal.run():
            pass
    except Exception as error:
        logger.warning("there are no rehearsals: %s", error)
        return None
    return rehearsal


class Practice:
    """Goes through a rehearsal when something is about to end that takes about the same time again and again. Used by
    one thread.

    Attributes
    ----------
    due
        Monotonic time from which on to go through it; infinite when no end is expected.
    """

    def __init__(self, rehearsal: Rehearsal | None, longest_s: float) -> None:
        """What takes more than `longest_s` is not waited for; nothing is without a rehearsal."""
        self._rehearsal = rehearsal
        self._longest_s = longest_s if rehearsal is not None else 0.0
        self._pieces: Iterator[float | None] = iter(())
        self._begun = -math.inf
        self._took = math.inf
        self._is_even = False
        self._piece_s = 0.0  # of the longest of the last pieces
        self.due = math.inf

    def begin(self, now: float) -> None:
        """It has begun."""
        self._begun = now
        self.due = now + self._took - BEFORE_S if self._is_even and self._took <= self._longest_s else math.inf

    def end(self, now: float) -> None:
        """It has ended, if it had begun."""
        if math.isinf(self._begun):
            return
        took, self._begun = now - self._begun, -math.inf
        self._is_even = abs(took - self._took) < BEFORE_S / 2
        self._took = took
        self.due = math.inf

    def time_left(self, now: float) -> float:
        """Seconds until it should end; negative when it has not begun, or nothing is known."""
        return self._begun + self._took - now if self._is_even else -math.inf

    def is_due(self, now: float) -> bool:
        """Whether to go on with it: a piece ends a moment before what is expected is due."""
        return self.due <= now < self.due + BEFORE_S - QUIET_S - self._piece_s

    def wait(self, has_come: Callable[[], bool]) -> None:
        """Goes through it until a moment before what is expected is due, or that has come; at once where nothing is."""
        while not has_come():
            now = time.monotonic()
            if self.is_due(now):
                self.go_on()
            elif now < self.due < math.inf:
                time.sleep(LOOK_EVERY_S)
            else:
                return

    def go_on(self) -> None:
        """Goes through the next piece. A rehearsal that fails is the last one: nobody waits for it."""
        rehearsal, began = self._rehearsal, time.monotonic()
        try:
            if rehearsal is not None and next(self._pieces, _NO_PIECE) is _NO_PIECE:
                rehearsal.prepare()
                self._pieces = rehearsal.run()
        except Exception:
            logger.exception("there are no rehearsals any more")
            self._rehearsal, self._longest_s, self.due = None, 0.0, math.inf
        self._piece_s = min(max(time.monotonic() - began, 0.9 * self._piece_s), BEFORE_S / 2)
