"""A step of the engine: its rows and its stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from verifier_service.core.batch import ForwardOutput, ScheduledRows
from verifier_service.core.request import Request
from verifier_service.core.step_times import StepMarks
from verifier_service.pacing import Limit
from verifier_service.sampling.logprobs import PromptLogprobs
from verifier_service.sampling.sampler import SamplerOutput

if TYPE_CHECKING:
    from verifier_service.drafters.drafting import DraftsOf
    from verifier_service.drafters.session import DraftSession, EarlyFeatures


class Stage(Enum):
    """Stage of a step."""

    PLANNED = auto()  # its rows are chosen
    PRELAUNCHED = auto()  # its forward pass is launched and waits for the drafts
    RELEASED = auto()  # its forward pass has all token ids and runs
    SAMPLED = auto()  # its tokens are sampled on the device
    COMMITTED = auto()  # its requests have its tokens
    ABANDONED = auto()  # its results are dropped


_NEXT: Mapping[Stage, frozenset[Stage]] = {
    Stage.PLANNED: frozenset({Stage.PRELAUNCHED, Stage.RELEASED, Stage.ABANDONED}),
    Stage.PRELAUNCHED: frozenset({Stage.RELEASED, Stage.ABANDONED}),
    Stage.RELEASED: frozenset({Stage.SAMPLED, Stage.ABANDONED}),
    Stage.SAMPLED: frozenset({Stage.COMMITTED, Stage.ABANDONED}),
    Stage.COMMITTED: frozenset(),
    Stage.ABANDONED: frozenset(),
}

StepObserver = Callable[["Step"], object]


@dataclass(eq=False)
class Step:
    """One batch, which is planned, executed and committed.

    A prelaunched step has a row for each draft that its requests may get. The actual rows replace them when the drafts
    have arrived.
    """

    rows: Sequence[ScheduledRows]
    observer: StepObserver | None = None  # called at each stage from PRELAUNCHED on; an exception fails the step
    stage: Stage = Stage.PLANNED
    num_rows: int = 0  # rows that the device computes, including padding for missing drafts
    is_beside: bool = False  # whether another step was in flight when this one was executed
    is_late: bool = False  # whether the step in flight ended before this step's forward pass was launched
    is_delayed: bool = False  # whether a step with prompts was executed before this one was committed
    forward: ForwardOutput | None = None  # from RELEASED to SAMPLED
    sampler_output: SamplerOutput | None = None  # of the rows that sample, from SAMPLED to COMMITTED
    prompt_logprobs: PromptLogprobs | None = None  # from SAMPLED to COMMITTED
    marks: StepMarks | None = None  # on a GPU
    announced: dict[DraftSession, EarlyFeatures] = field(default_factory=dict)  # announcements to drafters
    verified: Counter[DraftsOf] = field(default_factory=Counter)  # number of decoding requests
    limit: Limit | None = None  # of the verified drafts; None for all
    chosen: dict[Request, int] | None = None  # numbers of verified drafts, if released with a limit before its plan
    committed_at: float = 0.0  # monotonic time

    def advance(self, stage: Stage) -> None:
        """Enter the next stage."""
        assert stage in _NEXT[self.stage], (self.stage, stage)
        self.stage = stage
        if self.observer is not None:
            self.observer(self)

    def abandon(self) -> None:
        """Abandon the step at any stage and drop its tensors."""
        self.forward = self.sampler_output = self.prompt_logprobs = None
        if self.stage not in (Stage.COMMITTED, Stage.ABANDONED):
            self.advance(Stage.ABANDONED)

    @property
    def has_prompts(self) -> bool:
        """Return whether the step has rows of prompts."""
        return not all(row.is_decoding for row in self.rows)

    @property
    def num_prompt_rows(self) -> int:
        """Return the number of rows of prompts."""
        return sum(len(row.tokens) for row in self.rows if not row.is_decoding)

    @property
    def is_done(self) -> bool:
        """Return whether the device has finished the step."""
        return self.marks is None or self.marks.drawn.query()
