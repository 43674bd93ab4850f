"""Drafts that come with logits are drawn again now and then: whether they are what their logits sample."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from draftwire.contract.errors import Described, InvalidArgumentError
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.answers import find_belied

# Share of answers with logits whose drafts are drawn again, of a drafter at which there was no mismatch of late.
REDRAW_SHARE = 1 / 8

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


class Audit:
    """Draws drafts of all drafters again."""

    def __init__(self, *, use_fp64: bool) -> None:
        self._use_fp64 = use_fp64
        self._redraws: defaultdict[str, Redraws] = defaultdict(Redraws)  # by the drafter's address

    def find_unusable(
        self, address: str, answered: Sequence[tuple[Request, ReadyDrafts]], *, is_on_trial: bool
    ) -> list[ReadyDrafts]:
        """The drafts of the drafter at `address` that turn out not to be what their logits sample, and must not be
        used: some are drawn again, and all where one was found of late, or of a drafter that `is_on_trial`.

        Raises
        ------
        InvalidArgumentError
            When there have been too many of those.
        """
        redraws = self._redraws[address]
        is_suspect = is_on_trial or redraws.is_suspect
        drawn = [
            (request, drafts)
            for request, drafts in answered
            if drafts.tokens and drafts.logits is not None and request.params.temperature > 0
        ]
        chosen = [one for one in drawn if is_suspect or random.random() < REDRAW_SHARE]
        belied = find_belied(chosen, self._use_fp64)
        if belied and len(chosen) < len(drawn):
            chosen, belied = drawn, find_belied(drawn, self._use_fp64)
        redraws.take(len(chosen), len(belied))
        if belied and (is_on_trial or redraws.are_too_many):
            del self._redraws[address]  # its trial begins with a clean slate
            count = Described(f"{len(belied[-1].tokens)} drafts")
            raise InvalidArgumentError("drafts.tokens", count, "are not what its logits sample")
        return belied
