"""What drawing a drafter's drafts again has found of late, and whether that is too much."""

from __future__ import annotations

from collections import deque

# A drafter is judged by its last answers that were drawn again: one mismatch among so many, and all of its answers are
# drawn again; so many mismatches among them, and it is expelled.
#
# An honest draft mismatches where rounding, which differs between devices, swaps its two best scores. Less than e lies
# between those with a probability of e at most, and e is 1e-6 to 1e-5: a few last places of scores of 8 to 64. Of 16
# drafts that is 1.6e-4 of the answers and 1.6 in a window; 15 more in the window after one have a probability of 2e-10
# (Poisson). An honest drafter is expelled once in 3e13 answers then, and with 4 drafts and e = 1e-6 never.
#
# A liar is found at each of its lies with the probability REDRAW_SHARE, after seven that were used, on average. Then
# every lie is found and none used, until none was found in a window: seven lies used per window are the most that one
# who knows when it was found can have, and one who lies in a fixed share of its answers has one at most.
RECENT_REDRAWS = 10_000
TOO_MANY_MISMATCHES = 16


class Redraws:
    """Judges one drafter by the drafts that were drawn again, over all of its streams."""

    def __init__(self) -> None:
        self._count = 0
        self._mismatched_at: deque[int] = deque(maxlen=TOO_MANY_MISMATCHES)  # counts at the last of them

    def take(self, count: int, mismatches: int) -> None:
        """Takes that so many answers more were drawn again, of which so many did not match."""
        self._count += count
        self._mismatched_at.extend([self._count] * mismatches)

    @property
    def is_suspect(self) -> bool:
        """Whether there was a mismatch of late."""
        return bool(self._mismatched_at) and self._is_recent(self._mismatched_at[-1])

    @property
    def are_too_many(self) -> bool:
        """Whether there were so many mismatches of late that they are no rounding."""
        return len(self._mismatched_at) == TOO_MANY_MISMATCHES and self._is_recent(self._mismatched_at[0])

    def _is_recent(self, count: int) -> bool:
        return self._count - count < RECENT_REDRAWS
