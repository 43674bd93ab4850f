"""Circuit breaking of a drafter: too often late, it is left alone for a while, then tried with one sequence.

A drafter that was expelled for what it answered begins its next stream on such a trial.
"""

from __future__ import annotations

import enum
import math
from collections import deque

# A drafter is left alone once so many of its last answers were late, in a row or with others in between. On trial all
# of as many must be in time.
RECENT_ANSWERS = 16
TOO_MANY_LATE = 3
# None is late before this, however short the deadline: drafts that nobody waits for may still be there in time.
LEAST_LATE_S = 0.1
# So many deadlines, and no less than so many seconds, without an answer are as good.
OVERDUE_DEADLINES = 4
OVERDUE_S = 2.0
# How long it is left alone; after each trial that fails, twice as long.
REST_S = (0.5, 4.0)


class Circuit(enum.Enum):
    """Whether a drafter gets sequences: closed, all; open, none; half open, one."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()


class Breaker:
    """Judges one drafter by the time that its answers take. The clock is the caller's: monotonic times, in seconds."""

    def __init__(self, deadline_s: float | None, *, on_trial: bool = False) -> None:
        """`deadline_s`: how long drafts are waited for at most; without one no answer is late."""
        self.circuit = Circuit.HALF_OPEN if on_trial else Circuit.CLOSED
        self._deadline_s = math.inf if deadline_s is None else max(deadline_s, LEAST_LATE_S)
        self._are_late: deque[bool] = deque(maxlen=RECENT_ANSWERS)
        self._rest_s = REST_S[0]
        self._rests_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the drafter is left alone."""
        return self.circuit is Circuit.OPEN

    @property
    def is_on_trial(self) -> bool:
        """Whether it gets one sequence to show that it answers in time."""
        return self.circuit is Circuit.HALF_OPEN

    def take_answer(self, seconds: float, now: float) -> None:
        """Takes an answer with drafts that came so long after it was asked for, and after the answer before it."""
        if self.is_open:
            return
        is_late = seconds > self._deadline_s
        self._are_late.append(is_late)
        if is_late and (self.is_on_trial or sum(self._are_late) >= TOO_MANY_LATE):
            self._trip(now)
        elif self.is_on_trial and len(self._are_late) == RECENT_ANSWERS:
            self.circuit, self._rest_s = Circuit.CLOSED, REST_S[0]

    def watch(self, silent_since: float | None, now: float) -> None:
        """Lets time pass; the drafter owes an answer and has been silent since then, or owes none."""
        if self.is_open and now >= self._rests_until and silent_since is None:
            self.circuit = Circuit.HALF_OPEN
        overdue_s = max(OVERDUE_DEADLINES * self._deadline_s, OVERDUE_S)
        if not self.is_open and silent_since is not None and now - silent_since > overdue_s:
            self._trip(now)

    def _trip(self, now: float) -> None:
        if self.is_on_trial:
            self._rest_s = min(2 * self._rest_s, REST_S[1])
        self.circuit = Circuit.OPEN
        self._are_late.clear()
        self._rests_until = now + self._rest_s
