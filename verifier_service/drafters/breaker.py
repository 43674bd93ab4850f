"""Circuit breaker of a drafter: a drafter that is late too often gets no sequences for a while, then one on trial.

A drafter that was expelled for a wrong answer starts its next stream on trial.
"""

from __future__ import annotations

import enum
import math
from collections import deque

# TOO_MANY_LATE late answers among the last RECENT_ANSWERS open the breaker. On trial RECENT_ANSWERS answers in a row
# must be in time.
RECENT_ANSWERS = 16
TOO_MANY_LATE = 3
# No answer is late before this many seconds, even if the deadline is shorter: drafts may still be useful then.
LEAST_LATE_S = 0.1
# A missing answer opens the breaker after this many deadlines, and at least this many seconds.
OVERDUE_DEADLINES = 4
OVERDUE_S = 2.0
# Seconds that the breaker stays open; doubled after each failed trial.
REST_S = (0.5, 4.0)


class Circuit(enum.Enum):
    """State of a breaker: the drafter gets all sequences (closed), none (open) or one (half open)."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()


class Breaker:
    """Judges one drafter by its answer times. All times are the caller's monotonic seconds."""

    def __init__(self, deadline_s: float | None, *, on_trial: bool = False) -> None:
        """`deadline_s`: maximum wait for drafts; with None no answer is late."""
        self.circuit = Circuit.HALF_OPEN if on_trial else Circuit.CLOSED
        self._deadline_s = math.inf if deadline_s is None else max(deadline_s, LEAST_LATE_S)
        self._are_late: deque[bool] = deque(maxlen=RECENT_ANSWERS)
        self._rest_s = REST_S[0]
        self._rests_until = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the drafter gets no sequences."""
        return self.circuit is Circuit.OPEN

    @property
    def is_on_trial(self) -> bool:
        """Return whether the drafter is on trial with one sequence."""
        return self.circuit is Circuit.HALF_OPEN

    def take_answer(self, seconds: float, now: float) -> None:
        """Count an answer with drafts, `seconds` after the message or, if later, the previous answer."""
        if self.is_open:
            return
        is_late = seconds > self._deadline_s
        self._are_late.append(is_late)
        if is_late and (self.is_on_trial or sum(self._are_late) >= TOO_MANY_LATE):
            self._trip(now)
        elif self.is_on_trial and len(self._are_late) == RECENT_ANSWERS:
            self.circuit, self._rest_s = Circuit.CLOSED, REST_S[0]

    def watch(self, silent_since: float | None, now: float) -> None:
        """Update the state; an answer has been missing since `silent_since`, or none is missing (None)."""
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
