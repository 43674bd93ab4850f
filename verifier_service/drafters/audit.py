"""Drafts that come with logits are drawn again now and then, to find drafts that their logits do not sample."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from draftwire.contract.errors import Described, InvalidArgumentError
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.answers import find_mismatched

# Share of the answers with logits that are drawn again, for a drafter without a recent mismatch.
REDRAW_SHARE = 1 / 8

# A drafter is judged by its last RECENT_REDRAWS answers that were drawn again. After one mismatch among them all
# answers are drawn again. TOO_MANY_MISMATCHES among them expel the drafter.
#
# An honest draft mismatches where rounding, which differs between devices, swaps its two best scores. Less than e lies
# between those with a probability of e at most, and e is 1e-6 to 1e-5: a few last places of scores of 8 to 64. Of 16
# drafts that is 1.6e-4 of the answers and 1.6 in a window; 15 more in the window after one have a probability of 2e-10
# (Poisson). An honest drafter is expelled once in 3e13 answers then, and with 4 drafts and e = 1e-6 never.
#
# Each lie of a lying drafter is found with probability REDRAW_SHARE, on average after seven lies that were used. From
# then on every lie is found and none is used, until a whole window has no mismatch. So a liar that knows when it was
# found can have at most seven lies used per window, and one that lies in a fixed share of its answers at most one.
RECENT_REDRAWS = 10_000
TOO_MANY_MISMATCHES = 16


class AuditRecord:
    """Judges one drafter by the answers that were drawn again, over all of its streams.

    Attributes:
        count: Answers that were drawn again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mismatched_at: deque[int] = deque(maxlen=TOO_MANY_MISMATCHES)  # counts at the last of them

    def add(self, count: int, mismatches: int) -> None:
        """Count further answers that were drawn again, and those that did not match."""
        self.count += count
        self._mismatched_at.extend([self.count] * mismatches)

    @property
    def is_suspect(self) -> bool:
        """Return whether a mismatch is among the last `RECENT_REDRAWS` answers that were drawn again."""
        return bool(self._mismatched_at) and self._is_recent(self._mismatched_at[-1])

    @property
    def has_too_many(self) -> bool:
        """Return whether the recent mismatches are too many for rounding errors."""
        return len(self._mismatched_at) == TOO_MANY_MISMATCHES and self._is_recent(self._mismatched_at[0])

    def _is_recent(self, count: int) -> bool:
        return self.count - count < RECENT_REDRAWS


class Audit:
    """Draws a share of all drafts again, and finds drafters whose drafts do not follow their logits."""

    def __init__(self, *, use_fp64: bool) -> None:
        self._use_fp64 = use_fp64
        self._records: defaultdict[str, AuditRecord] = defaultdict(AuditRecord)  # by the drafter's address

    def record_of(self, address: str) -> AuditRecord:
        """Return the record of the drafter at an address."""
        return self._records[address]

    def find_unusable(
        self, address: str, answered: Sequence[tuple[Request, ReadyDrafts]], *, is_on_trial: bool
    ) -> list[ReadyDrafts]:
        """Return the drafts of a drafter's answers that must not be used: those that their logits do not sample.

        A share of the answers is drawn again. All answers are, if a mismatch was found recently or the drafter
        `is_on_trial`.

        Raises:
            InvalidArgumentError: When there were too many mismatches.
        """
        record = self._records[address]
        is_suspect = is_on_trial or record.is_suspect
        drawn = [
            (request, drafts)
            for request, drafts in answered
            if drafts.tokens and drafts.logits is not None and request.params.temperature > 0
        ]
        chosen = [one for one in drawn if is_suspect or random.random() < REDRAW_SHARE]
        mismatched = find_mismatched(chosen, self._use_fp64)
        if mismatched and len(chosen) < len(drawn):
            chosen, mismatched = drawn, find_mismatched(drawn, self._use_fp64)
        record.add(len(chosen), len(mismatched))
        if mismatched and (is_on_trial or record.has_too_many):
            del self._records[address]  # its trial begins with a clean slate
            count = Described(f"{len(mismatched[-1].tokens)} drafts")
            raise InvalidArgumentError("drafts.tokens", count, "are not what its logits sample")
        return mismatched
