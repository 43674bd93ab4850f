"""A share of the drafts with logits is sampled again, to find drafts that do not follow their logits."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from draftwire.contract.errors import Described, InvalidArgumentError
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.answers import find_mismatched

# Share of the answers with logits that are sampled again, for a drafter without a recent mismatch.
REDRAW_SHARE = 1 / 8

# A drafter is judged by its last RECENT_REDRAWS answers that were sampled again. After one mismatch among them all
# answers are sampled again. TOO_MANY_MISMATCHES among them expel the drafter.
#
# A correct draft mismatches if rounding, which differs between devices, swaps its two best scores. Their difference is
# less than e with a probability of at most e, and e is 1e-6 to 1e-5: a few units in the last place of scores of 8 to
# 64. With 16 drafts per answer that is 1.6e-4 of the answers and 1.6 per window; 15 more in the window after a mismatch
# have a probability of 2e-10 (Poisson). So a correct drafter is expelled once in 3e13 answers, and with 4 drafts and
# e = 1e-6 never.
#
# Each wrong answer of a malicious drafter is found with probability REDRAW_SHARE, on average after seven wrong answers
# that were used. From then on every wrong answer is found and none is used, until a whole window has no mismatch. So
# at most seven wrong answers per window are used of a drafter that knows when it was found, and at most one of a
# drafter with a constant share of wrong answers.
RECENT_REDRAWS = 10_000
TOO_MANY_MISMATCHES = 16


class AuditRecord:
    """Judges one drafter by the answers that were sampled again, over all of its streams.

    Attributes:
        count: Number of answers that were sampled again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mismatched_at: deque[int] = deque(maxlen=TOO_MANY_MISMATCHES)  # `count` at the last mismatches

    def add(self, count: int, mismatches: int) -> None:
        """Count answers that were sampled again, and those that did not match."""
        self.count += count
        self._mismatched_at.extend([self.count] * mismatches)

    @property
    def is_suspect(self) -> bool:
        """Return whether a mismatch is among the last `RECENT_REDRAWS` answers that were sampled again."""
        return bool(self._mismatched_at) and self._is_recent(self._mismatched_at[-1])

    @property
    def has_too_many(self) -> bool:
        """Return whether the recent mismatches are too many for rounding errors."""
        return len(self._mismatched_at) == TOO_MANY_MISMATCHES and self._is_recent(self._mismatched_at[0])

    def _is_recent(self, count: int) -> bool:
        return self.count - count < RECENT_REDRAWS


class Audit:
    """Samples a share of all drafts again, and finds drafters whose drafts do not follow their logits."""

    def __init__(self, *, use_fp64: bool) -> None:
        self._use_fp64 = use_fp64
        self._records: defaultdict[str, AuditRecord] = defaultdict(AuditRecord)  # by the drafter's address

    def record_of(self, address: str) -> AuditRecord:
        """Return the record of the drafter at an address."""
        return self._records[address]

    def find_unusable(
        self, address: str, answered: Sequence[tuple[Request, ReadyDrafts]], *, is_on_trial: bool
    ) -> list[ReadyDrafts]:
        """Return the drafts of a drafter's answers that must not be used, because they do not follow their logits.

        A share of the answers is sampled again; all of them if a mismatch was found recently or the drafter
        `is_on_trial`.

        Raises:
            InvalidArgumentError: If there were too many mismatches.
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
            del self._records[address]  # the drafter's trial starts with an empty record
            count = Described(f"{len(mismatched[-1].tokens)} drafts")
            raise InvalidArgumentError("drafts.tokens", count, "are not what its logits sample")
        return mismatched
