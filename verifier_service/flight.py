"""A step between its launch and the taking of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verifier_service.core.batch import ScheduledRows
from verifier_service.draft_session import DraftSession
from verifier_service.features_ahead import FeaturesAhead
from verifier_service.sampler import PendingDraw
from verifier_service.step_times import StepMarks


@dataclass(frozen=True)
class Flight:
    """A step that was launched, until its tokens have been taken."""

    works: Sequence[ScheduledRows]
    sampling: Sequence[ScheduledRows]
    pending: PendingDraw | None  # of those that sample
    marks: StepMarks | None  # on a GPU
    num_rows: int = 0  # that are computed: those of the works, and others that were launched with them
    ahead: dict[DraftSession, FeaturesAhead] = field(default_factory=dict)  # on their way, until it lands
    is_beside: bool = False  # another step ran when it was launched
    # Its decoding requests, by the address of their drafter ("" for none) and their number of drafts.
    verified: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def has_drafts(self) -> bool:
        """Whether it verifies any."""
        return any(drafts for _, drafts in self.verified)

    @property
    def has_prompts(self) -> bool:
        """Whether it has rows of any."""
        return not all(work.is_decoding for work in self.works)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to wait for."""
        return self.marks is None or self.marks.drawn.query()
