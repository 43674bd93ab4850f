"""The forward pass that will verify awaited drafts: launched while they are on their way, begun when they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draftwire.practice import Practice
from verifier_service.draft_answer import read_ahead
from verifier_service.draft_session import AwaitedAnswer
from verifier_service.draft_stream import Answered
from verifier_service.expected_step import ExpectedStep
from verifier_service.request import Request
from verifier_service.scheduler import Work
from verifier_service.step_gate import StepGate
from verifier_service.step_times import Phase, StepTimes
from verifier_service.target_runner import HeldStep, StepOutput, StepRows


class PassAhead:
    """One pass at a time. Used by the engine's thread alone."""

    def __init__(
        self,
        hold: Callable[[StepRows], HeldStep | None],
        gate: StepGate,
        vocab_size: int,
        times: StepTimes,
        practice: Practice,
    ) -> None:
        """`hold` launches a step; `practice` is told when it begins."""
        self._hold = hold
        self._gate = gate
        self._vocab_size = vocab_size
        self._times = times
        self._practice = practice
        self._step: ExpectedStep | None = None
        self._awaited: AwaitedAnswer | None = None  # by the step, if that is one answer

    @property
    def is_pending(self) -> bool:
        """Whether there is one that was neither taken nor dropped."""
        return self._step is not None and self._step.is_pending

    @property
    def has_begun(self) -> bool:
        """Whether there is one that has begun, and was neither taken nor dropped."""
        return self._step is not None and self._step.has_begun

    @property
    def until(self) -> float | None:
        """Monotonic time at which the last one is given up; None when there was none."""
        return None if self._step is None else self._step.until

    def launch(self, expected: Sequence[tuple[Request, int]]) -> None:
        """Launches the pass of these requests with so many drafts, unless it was the last one."""
        step = ExpectedStep(expected)
        if step.is_same(self._step):
            return
        self._step = step
        step.launch(self._hold)
        self._awaited = self._gate.awaited_answer()
        if self._awaited is not None:
            step.foresee(self._awaited.requests, self._awaited.num_drafts)

    def begin_with(self, answer: Answered) -> bool:
        """Begins it with the drafts of an answer that has not been checked, if that is the one that was awaited; they
        come to nothing should it prove wrong."""
        step, awaited = self._step, self._awaited
        if step is None or awaited is None or awaited.stream is not answer.stream or not step.can_begin_with:
            return False
        tokens = read_ahead(answer.drafts, awaited, self._vocab_size)
        if tokens is None:
            return False
        self._begin(lambda: step.begin_with(tokens))
        return True

    def begin(self) -> bool:
        """Begins it with the drafts that its requests have, if no more are awaited."""
        if self._step is None or not self._step.has_all(self._gate.is_waiting):
            return False
        self._begin(self._step.begin)
        return True

    def _begin(self, begin: Callable[[], object]) -> None:
        self._times.enter(Phase.VERIFY)
        try:
            begin()
            self._practice.begin(time.monotonic())
        finally:
            self._times.enter(Phase.HOST)

    def take(self, works: Sequence[Work]) -> StepOutput | None:
        """Its output, if it is the pass of `works`; see `ExpectedStep`."""
        return None if self._step is None else self._step.take(works)

    def drop(self) -> None:
        """Gives it up."""
        self._awaited = None  # it keeps a stream, and with it memory that is shared with a drafter
        if self._step is not None:
            self._step.drop()
