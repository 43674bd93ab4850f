"""The forward pass that will verify awaited drafts: launched before they are there, and begun then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verifier_service.core.batch import ForwardOutput, ScheduledRows
from verifier_service.draft_answer import read_ahead, read_board
from verifier_service.draft_session import AwaitedAnswer
from verifier_service.draft_stream import Answered
from verifier_service.expected_step import ExpectedStep
from verifier_service.request import Request
from verifier_service.step_gate import StepGate
from verifier_service.step_times import Phase, StepTimes
from verifier_service.target_runner import TargetRunner


class PassAhead:
    """One pass at a time. Used by the engine's thread alone."""

    def __init__(self, runner: TargetRunner, gate: StepGate, vocab_size: int, times: StepTimes) -> None:
        self._runner = runner
        self._gate = gate
        self._vocab_size = vocab_size
        self._times = times
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
        """Monotonic time at which it is given up; None when there is none."""
        return self._step.until if self._step is not None and self._step.is_pending else None

    def launch(self, expected: Sequence[tuple[Request, int]]) -> None:
        """Launches the pass of these requests with so many drafts, unless it was the last one."""
        step, self._awaited = ExpectedStep(expected), None
        if step.is_same(self._step):
            return
        self._step = step
        step.launch(self._runner)

    def foresee(self) -> None:
        """Prepares to begin it with the drafts that its requests wait for."""
        self._awaited = self._gate.awaited_answer()
        if self._awaited is not None and self._step is not None:
            self._step.foresee(self._awaited.requests, self._awaited.num_drafts)

    def begin_with(self, answer: Answered) -> bool:
        """Begins it with the drafts of an answer that has not been checked, if that is the one that was awaited and it
        has not begun; they come to nothing should it prove wrong."""
        step, awaited = self._step, self._awaited
        if step is None or awaited is None or awaited.stream is not answer.stream or not step.can_begin_with:
            return False
        tokens = read_ahead(answer.drafts, awaited, self._vocab_size)
        if tokens is None:
            return False
        self._begin(lambda: step.begin_with(tokens))
        return True

    @property
    def sees_drafts(self) -> bool:
        """Whether the drafts that it waits for have come on the board, and their answer has not begun it."""
        step, awaited = self._step, self._awaited
        if awaited is None or awaited.foretold is None or step is None or not step.can_begin_with:
            return False
        board = awaited.stream.board
        return board is not None and board.has_drafts(awaited.foretold.drawn)

    def begin_with_board(self) -> bool:
        """Begins it with the drafts that it sees, before the answer that brings them; they come to nothing should that
        be another one."""
        step, awaited = self._step, self._awaited
        assert step is not None
        assert awaited is not None
        assert awaited.stream.board is not None
        self._awaited = awaited._replace(foretold=None)  # whatever it finds, it looks once
        tokens = read_board(awaited.stream.board, awaited, self._vocab_size)
        if tokens is None:
            return False
        step.begin_with(tokens)
        self._times.see_drafts()
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
        finally:
            self._times.enter(Phase.HOST)

    def take(self, works: Sequence[ScheduledRows]) -> ForwardOutput | None:
        """Its output, if it is the pass of `works`; see `ExpectedStep`."""
        return None if self._step is None else self._step.take(works)

    def drop(self) -> None:
        """Gives it up."""
        self._awaited = None  # it keeps a stream, and with it memory that is shared with a drafter
        if self._step is not None:
            self._step.drop()
