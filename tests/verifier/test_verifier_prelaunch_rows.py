"""The lifecycle of a step, and the rows of drafts in a prelaunched step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafting_scene import Scene, answer_to, make_head, make_request
from engine_scene import Served, make_target
from tiny_targets import VOCAB

from draftwire.model.tensors import encode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ForwardInput, ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters import session as draft_session
from verifier_service.drafters.budgeting import DraftBudget, Offers
from verifier_service.drafters.session import AwaitedAnswer
from verifier_service.drafters.stream import Answered
from verifier_service.engine.prelaunch import Prelaunch
from verifier_service.engine.step import Stage, Step
from verifier_service.pacing import Limit, Profile, VerificationBudget


class NoRunner:
    """A runner that computes nothing. `released` has the token ids of each pass, None for an abandoned pass."""

    def __init__(self) -> None:
        self.released: list[Any] = []
        self.counts: list[int] | None = None  # rows of each sequence in the last released pass
        self.most_rows: int | None = None  # maximum rows of the last prelaunched pass

    def prelaunch(self, _: ForwardInput, most_rows: int | None = None) -> bool:
        self.most_rows = most_rows
        return True

    def release(self, token_ids: Any, counts: Any = None) -> None:
        self.released.append(token_ids.tolist())
        self.counts = None if counts is None else counts.tolist()

    def abandon(self) -> None:
        self.released.append(None)


def awaited_by(scene: Scene, stream: Any) -> AwaitedAnswer:
    awaited = scene.drafting.wait_policy.awaited_answer()
    assert awaited is not None
    assert awaited.stream is stream
    return awaited


def test_the_awaited_answer_brings_all_drafts():
    scene = Scene()
    stream = scene.connect()
    requests = [scene.decode(2 + i) for i in range(3)]
    assert scene.drafting.wait_policy.awaited_answer() is None
    assert not scene.drafting.wait_policy.all_wait(requests)
    scene.flush()
    awaited = awaited_by(scene, stream)
    assert (awaited.requests, awaited.num_drafts) == (requests, [3, 3, 3])
    assert scene.drafting.wait_policy.all_wait(requests)
    assert not scene.drafting.wait_policy.all_wait([])
    answer = answer_to(stream.steps[-1])
    found = awaited.read_answer(answer, VOCAB)
    assert found is not None
    assert (found.tokens.tolist(), found.confidences) == ([5, 6, 7] * 3, None)
    assert awaited.read_answer(answer, 7) is None  # an id beyond the vocabulary
    for change in (
        lambda one: setattr(one, "step_id", one.step_id + 1),
        lambda one: one.sequence_ids.pop(),
        lambda one: one.num_drafts.__setitem__(0, 2),
        lambda one: setattr(one.tokens, "data", one.tokens.data[:-4]),
    ):
        wrong = pb.Drafts.FromString(answer.SerializeToString())
        change(wrong)
        assert awaited.read_answer(wrong, VOCAB) is None
    scene.decode(3)
    scene.flush()  # requests drafts of another sequence in a second message
    assert scene.drafting.wait_policy.awaited_answer() is None
    scene.answer(stream)
    assert not scene.drafting.wait_policy.all_wait(requests)


class AllDrafts(DraftBudget):
    """A budget without limits, of requests without drafters."""

    def __init__(self) -> None:
        super().__init__({}, VerificationBudget(Profile(), is_adaptive=False))

    def choose(self, limit: Limit | None, offers: Offers) -> np.ndarray:
        assert limit is None
        return super().choose(limit, offers)


class FixedChoice(AllDrafts):
    """A budget that always makes one choice. `asked` has the limits and the offers."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self._counts = np.array(counts)
        self.asked: list[tuple[Limit | None, Offers]] = []

    def choose(self, limit: Limit | None, offers: Offers) -> np.ndarray:
        self.asked.append((limit, offers))
        return self._counts


def awaited_rows(request: Request, num_drafts: int) -> ScheduledRows:
    last = len(request.tokens) - 1
    return ScheduledRows(request, last, [request.tokens[last]] + [0] * num_drafts, None, samples=True)


def answer_with(stream: Any, drafts: list[list[int]]) -> tuple[AwaitedAnswer, Answered]:
    """Return what the verifier expects of an answer, and the answer."""
    answer = pb.Drafts(step_id=1, sequence_ids=range(1, 1 + len(drafts)), num_drafts=map(len, drafts))
    encode_tensor(torch.tensor([token for own in drafts for token in own], dtype=torch.int32), answer.tokens)
    return AwaitedAnswer(stream, 1, [*answer.sequence_ids], [*answer.num_drafts], []), Answered(stream, answer)


def decoding_requests(count: int) -> list[Request]:
    """Return requests with 16 tokens, of which the last has not run."""
    requests = [make_request([1 + i] * 16) for i in range(count)]
    for request in requests:
        request.blocks, request.num_computed = [4, 5], 15
    return requests


class NoConfidences:
    """A stream whose drafts have no confidences."""

    head = make_head()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_drafts_go_where_their_requests_are_in_the_step(order):
    requests = decoding_requests(4)
    requests[3].drafts = ReadyDrafts(16, 4, [8])  # arrived earlier
    drafts = [[11, 12, 13], [14], [15, 16]]
    runner: Any = NoRunner()
    step = Step([*map(awaited_rows, requests, [3, 1, 2, 3])])
    waiting = Prelaunch(runner, VOCAB, AllDrafts())
    waiting.launch(step)
    awaited, answer = answer_with(NoConfidences(), [drafts[i] for i in order])
    assert waiting.read_answer(answer) is None
    waiting.expect(replace(awaited, requests=requests[:1], num_drafts=[4]))  # more drafts than launched rows
    assert waiting.read_answer(answer) is None
    waiting.expect(replace(awaited, requests=[requests[i] for i in order]))
    found = waiting.read_answer(answer)
    assert found is not None
    waiting.release(found)
    assert runner.released == [[1, 11, 12, 13, 2, 14, 3, 15, 16, 4, 8, 0, 0]]
    assert step.stage is Stage.RELEASED
    assert waiting.read_answer(answer) is None


@pytest.mark.parametrize("head_confidences", [None, [0.9, 0.8, 0.5, 0.4, 0.3, 0.2]])
def test_a_limited_pass_has_the_chosen_rows_alone(head_confidences):
    """The chosen rows are written when the drafts have arrived; the plan uses the same choice."""
    requests = decoding_requests(3)
    requests[2].drafts = ReadyDrafts(16, 3, [8, 9], confidences=[0.7, 0.6])  # arrived earlier
    limit, budget = Limit(0.25, 4), FixedChoice([1, 2, 0])
    runner: Any = NoRunner()
    step = Step([*map(awaited_rows, requests, [3, 3, 2])], limit=limit)
    waiting = Prelaunch(runner, VOCAB, budget)
    waiting.launch(step)
    assert runner.most_rows == 3 + 4
    awaited, answer = answer_with(NoConfidences(), [[11, 12, 13], [14, 15, 16]])
    waiting.expect(replace(awaited, requests=requests[:2]))
    found = waiting.read_answer(answer)
    assert found is not None
    confidences = None if head_confidences is None else np.array(head_confidences, np.float32)
    waiting.release(found._replace(confidences=confidences))
    first_two = [[None] * 3] * 2 if head_confidences is None else [head_confidences[:3], head_confidences[3:]]
    (asked,) = budget.asked
    given = [[None if np.isnan(one) else one for one in own] for own in asked[1].confidences.round(2)]
    assert given == [*first_two, [0.7, 0.6, None]]
    assert (asked[0], asked[1].requests, asked[1].num_drafts.tolist()) == (limit, requests, [3, 3, 2])
    assert (runner.released, runner.counts) == ([[1, 11, 2, 14, 15, 3]], [2, 3, 1])
    assert step.chosen == {requests[0]: 1, requests[1]: 2, requests[2]: 0}
    assert waiting.pending is step


@pytest.mark.parametrize(("num_drafts", "begins"), [((1, 2), True), ((3, 1), True), ((3, 3), False)])
def test_a_limited_pass_is_confirmed_where_the_rows_fit(num_drafts, begins):
    requests = [make_request([1 + i] * 16) for i in range(2)]
    for request in requests:
        request.tokens.append(1)
        request.blocks, request.num_computed = [4, 5], 16
    runner: Any = NoRunner()
    waiting = Prelaunch(runner, VOCAB, AllDrafts())
    waiting.launch(Step([*map(awaited_rows, requests, [3, 3])], limit=Limit(0.0, 4)))
    rows = [
        ScheduledRows(one, 16, [1, *[7] * count], ReadyDrafts(17, 1, [7] * count), samples=True)
        for one, count in zip(requests, num_drafts, strict=True)
    ]
    assert waiting.confirm(rows) is None  # the runner's result
    assert runner.counts == ([1 + count for count in num_drafts] if begins else None)
    assert len(runner.released[0] or []) == (2 + sum(num_drafts) if begins else 0)


def test_no_more_drafts_are_expected_than_the_context_holds(monkeypatch):
    monkeypatch.setattr(draft_session, "MAX_UNANSWERED_STEPS", 1)
    scene = Scene()
    stream = scene.connect()
    request = scene.decode(4, max_tokens=6)
    scene.flush()
    scene.answer(stream)
    assert request.drafts is not None
    scene.compute(scene.admit(8), 8)  # rows of a prompt, which the drafter does not answer
    scene.flush()
    scene.step(request, 5, 6, 7)
    waits = scene.drafting.wait_policy
    assert waits.is_waiting(request)  # until the drafter can take another step
    assert (request.num_drafts_wanted, waits.expected_drafts([request])) == (1, [1])


def test_a_step_is_confirmed_for_the_same_requests_and_blocks():
    def begun(change: Any = None, num_drafts: int = 3, drafts: tuple[int, ...] = (7, 8)) -> bool:
        """Return whether a step launched with `num_drafts` drafts of a request starts with `drafts` after a change."""
        request = make_request([1] * 16)
        request.tokens.append(1)
        request.blocks, request.num_computed = [4, 5], 16  # blocks of 16 rows
        runner: Any = NoRunner()
        step, waiting = Step([awaited_rows(request, num_drafts)]), Prelaunch(runner, VOCAB, AllDrafts())
        waiting.launch(step)
        if change is not None:
            change(request)
        ready = ReadyDrafts(17, 1, list(drafts)) if drafts else None
        rows = ScheduledRows(request, 16, [1, *drafts], ready, samples=True)
        assert waiting.confirm([rows]) is None  # the runner's result
        assert waiting.pending is None
        assert step.stage is Stage.ABANDONED
        assert runner.released in ([None], [[1, *drafts, *[0] * (num_drafts - len(drafts))]])
        return runner.released != [None]

    assert begun()
    assert begun(drafts=())
    assert begun(drafts=(7, 8, 9))
    assert not begun(num_drafts=1)
    assert begun(lambda request: request.blocks.append(9))
    assert not begun(lambda request: request.blocks.__setitem__(1, 9))
    assert begun(lambda request: request.blocks.__setitem__(0, 9))  # holds none of the rows
    assert not begun(lambda request: setattr(request, "num_preemptions", 1))


def test_a_step_tells_each_stage_and_skips_none():
    seen: list[Stage] = []
    step = Step((), lambda one: seen.append(one.stage))
    for stage in (Stage.PRELAUNCHED, Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED):
        step.advance(stage)
    assert seen == [Stage.PRELAUNCHED, Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED]
    step.abandon()  # too late
    assert step.stage is Stage.COMMITTED
    with pytest.raises(AssertionError):
        Step(()).advance(Stage.SAMPLED)


def test_a_step_is_abandoned_once():
    seen: list[Stage] = []
    step = Step((), lambda one: seen.append(one.stage))
    step.abandon()
    step.abandon()
    assert seen == [Stage.ABANDONED]


@pytest.mark.usefixtures("scheduling")
def test_the_steps_of_an_engine_are_all_committed_in_order():
    own = Served(make_target())
    stages: dict[Step, list[Stage]] = {}
    for stage in (Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED, Stage.ABANDONED):
        own.on_stage(stage, lambda step: stages.setdefault(step, []).append(step.stage))
    one = own.submit(k=0, max_tokens=10)
    own.run(one)
    assert len(stages) >= 10
    assert all(seen == [Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED] for seen in stages.values())
