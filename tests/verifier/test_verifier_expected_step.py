"""Forward passes that are launched while their drafts are awaited."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drafting_scene import Scene, answer_to, make_request
from engine_scene import VOCAB, WAIT_S, K, Served, make_target

from draftwire.v1 import draft_pb2 as pb
from verifier_service import draft_session, expected_step, features_ahead
from verifier_service import engine as engine_module
from verifier_service.core.batch import ForwardInput, ForwardOutput, ScheduledRows
from verifier_service.draft_answer import read_ahead
from verifier_service.draft_session import AwaitedAnswer
from verifier_service.draft_stream import Answered, Disconnected
from verifier_service.expected_step import ExpectedStep
from verifier_service.features_ahead import Foretold
from verifier_service.pacing import Pace, Plan
from verifier_service.request import ReadyDrafts
from verifier_service.step_gate import StepGate
from verifier_service.target import Target

REQUESTS = [{"prompt": [3 + i, 1, 4], "max_tokens": 30 - i} for i in range(4)]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(autouse=True)
def one_group(monkeypatch) -> None:
    """All sequences share a step, and a machine under load gives up none."""

    def planned(pace: Pace, *_: object) -> None:
        pace.governor.plan = Plan(K)

    monkeypatch.setattr(Pace, "make_plan", planned)
    monkeypatch.setattr(expected_step, "PATIENCE_S", WAIT_S)


class NotedRunner:
    """Prelaunches by another runner, and counts that."""

    def __init__(self, own: Noted, runner: Any) -> None:
        self._own, self._runner = own, runner

    def prelaunch(self, step: ForwardInput) -> bool:
        assert self._runner.prelaunch(step)
        self._own.held.append(step)
        self._own._has_held.set()
        return True

    def release(self, token_ids: Any) -> ForwardOutput | None:
        self._own.num_begun += 1
        return self._runner.release(token_ids)

    def abandon(self) -> None:
        self._own.num_dropped += 1
        self._runner.abandon()


class NoRunner:
    """Computes nothing; `released` are the token ids of each pass, None of one that was given up."""

    def __init__(self) -> None:
        self.released: list[Any] = []

    def prelaunch(self, _: ForwardInput) -> bool:
        return True

    def release(self, token_ids: Any) -> None:
        self.released.append(token_ids.tolist())

    def abandon(self) -> None:
        self.released.append(None)


class Noted(Served):
    """An engine that counts what becomes of the steps that it holds."""

    def __init__(self, target: Target, config: dict[str, Any] | None = None, **limits: Any) -> None:
        super().__init__(target, config, **{"async_scheduling": True, **limits})
        self.num_held = self.num_begun = self.num_dropped = self.num_foreseen = 0
        self.held: list[ForwardInput] = []
        self._has_held = threading.Event()
        self.runner = NotedRunner(self, self.engine._pass_ahead._runner)
        self.engine._pass_ahead._runner = self.runner
        begin_with = self.engine._pass_ahead.begin_with

        def noted_begin_with(event: Answered) -> bool:
            has_begun = begin_with(event)
            self.num_foreseen += has_begun
            return has_begun

        self.engine._pass_ahead.begin_with = noted_begin_with  # type: ignore[method-assign]

    def connect_late(self, drafts_for: Any = lambda _: [5, 6, 7]) -> Any:
        """A drafter that answers when the step that verifies its drafts is held, if one is."""
        stream = self.connect_with(drafts_for)
        answer = stream.on_send

        steps: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def answer_all() -> None:
            while True:
                step = steps.get()
                self._has_held.wait(0.02)
                answer(step)

        def on_send(step: Any) -> None:
            self._has_held.clear()
            steps.put(step)

        threading.Thread(target=answer_all, daemon=True).start()
        stream.on_send = on_send
        return stream


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_so()


def undrafted(target: Target, requests: list[dict[str, Any]]) -> list[list[int]]:
    own = Served(target, max_queue=100)
    made = [own.submit(**{**one, "k": 0}) for one in requests]
    own.engine.start()
    tokens = [own.tokens(one) for one in made]
    own.engine.stop()
    return tokens


@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 9}, {"draft_deadline_s": 0.0005}, {"max_num_seqs": 2}, {"prefix_caching": False}]
)
@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8}, {"presence_penalty": 0.5, "logprobs": 1}])
def test_the_output_is_that_without_drafts(target, limits, kind):
    requests = [{**one, **kind} for one in REQUESTS]
    own = Noted(target, {"draft_sample_method": "gumbel", "rejection_sample_method": "coupled"}, **limits)
    own.connect_late()
    made = [own.submit(**one) for one in requests]
    own.engine.start()
    assert [own.tokens(one) for one in made] == undrafted(target, requests)
    own.engine.stop()
    assert len(own.held) == own.num_begun + own.num_dropped
    assert own.num_begun > 0 or "draft_deadline_s" in limits
    if not limits:
        assert own.num_begun > 0.8 * len(own.held)
    assert own.engine.kv_cache_usage == 0.0


def test_nearly_every_step_with_drafts_is_one_that_was_held(target):
    own = Noted(target)
    own.connect_late()
    one = own.submit(max_tokens=40)
    own.engine.start()
    own.tokens(one)
    own.engine.stop()
    assert sum(fallback.tokens for fallback in own.engine.counters().fallbacks) == 1  # the last token needs no drafts
    assert (own.num_begun, own.num_dropped) == (one.verify_steps - 1, 0)
    assert own.num_foreseen == own.num_begun


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (lambda _: None, True),
        (lambda drafts: drafts.last_tokens.__setitem__(0, 1 + drafts.last_tokens[0]), True),  # continues something else
        (lambda drafts: drafts.statuses.__setitem__(0, pb.SEQUENCE_STATUS_UNKNOWN), True),
        (lambda drafts: setattr(drafts, "compute_time_s", -1.0), True),  # it is expelled for that
        (lambda drafts: drafts.committed_lengths.append(1), True),
        (lambda drafts: setattr(drafts.tokens, "data", b"\xff" * len(drafts.tokens.data)), False),
        (lambda drafts: drafts.sequence_ids.reverse(), False),
    ],
)
def test_a_step_begins_before_its_answer_is_checked_and_comes_to_nothing_where_that_is_wrong(target, change, begins):
    own = Noted(target)
    begin_with, begun = own.engine._pass_ahead.begin_with, []

    def spoilt(event: Answered) -> bool:
        expected = own.engine._pass_ahead._step
        if expected is not None and expected.can_begin_with and len(event.drafts.sequence_ids) == len(REQUESTS):
            if len(begun) == 2:
                change(event.drafts)
            begun.append(begin_with(event))
            return begun[-1]
        return begin_with(event)

    own.engine._pass_ahead.begin_with = spoilt  # type: ignore[method-assign]
    own.connect_late()
    made = [own.submit(**one) for one in REQUESTS]
    own.engine.start()
    assert [own.tokens(one) for one in made] == undrafted(target, REQUESTS)
    own.engine.stop()
    assert begun[:3] == [True, True, begins]
    assert len(own.held) == own.num_begun + own.num_dropped
    assert own.engine.kv_cache_usage == 0.0


class Board:
    """What a drafter's device writes: its drafts, before it answers."""

    def __init__(self) -> None:
        self.written: np.ndarray | None = None

    def has_drafts(self, _drawn: pb.SharedSpan) -> bool:
        return self.written is not None

    def drafts(self, _drawn: pb.SharedSpan, shape: tuple[int, int]) -> np.ndarray:
        assert self.written is not None
        tokens, self.written = self.written, None
        assert tokens.shape == shape
        return tokens


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8}])
@pytest.mark.parametrize("wrong", [None, 7, -1])
def test_a_step_begins_with_what_is_on_the_board_and_is_that_of_its_answer(target, monkeypatch, kind, wrong):
    """A board that says something else than the answer makes
    a step that comes to nothing, now and then."""
    monkeypatch.setattr(engine_module, "awake_s", lambda _: WAIT_S)
    monkeypatch.setattr(features_ahead, "_foretell", lambda *_: Foretold(pb.SharedSpan(), K))
    own, board = Noted(target), Board()
    begin_with_board = own.engine._pass_ahead.begin_with_board
    begun, written = [], []

    def noted_begin_with_board() -> bool:
        begun.append(begin_with_board())
        has_begun.set()
        return begun[-1]

    def answer_all() -> None:
        while (step := steps.get()) is not None:
            has_begun.wait(0.5)
            own.engine.post(Answered(stream, answer_to(step, [5, 6, 7])))

    def on_send(step: Any) -> None:
        has_begun.clear()
        if step.sequence_ids and all(step.num_drafts):
            drafts = np.array([[5, 6, 7]] * len(step.sequence_ids), np.int32)
            written.append(wrong if len(written) % 3 == 0 else None)
            if written[-1] is not None:
                drafts[0, 1] = wrong
            board.written = drafts
        steps.put(step)

    steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
    has_begun = threading.Event()
    threading.Thread(target=answer_all, daemon=True).start()
    monkeypatch.setattr(StepGate, "part_next", lambda _: None)  # all requests stay in one step
    own.engine._pass_ahead.begin_with_board = noted_begin_with_board  # type: ignore[method-assign]
    seen, behind = [], []
    monkeypatch.setattr(own.engine.times, "see_drafts", lambda: seen.append(True))
    monkeypatch.setattr(own.engine.times, "count_answer", lambda _, *, is_behind: behind.append(is_behind))
    stream = own.connect()
    stream.board, stream.on_send = board, on_send
    made = [own.submit(**{**one, **kind}) for one in REQUESTS]
    own.engine.start()
    found = [own.tokens(one) for one in made]
    own.engine.stop()
    steps.put(None)
    if not kind:
        assert found == undrafted(target, REQUESTS)
    assert len(written) >= len(begun) > 0.7 * len(written) > 7
    assert begun.count(False) == (0 if wrong != -1 else pytest.approx(len(begun) / 3, abs=2))
    assert behind.count(True) >= len(seen) == begun.count(True)
    assert len(own.held) == own.num_begun + own.num_dropped
    assert own.num_foreseen <= len(written) - begun.count(True)  # the others were begun by their answers
    assert own.engine.kv_cache_usage == 0.0


def test_a_drafter_that_has_gone_is_not_kept_by_the_step_that_waited_for_it(target):
    own = Noted(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    one = own.submit(max_tokens=20)
    own.engine.start()
    wait_until(lambda: own.engine._pass_ahead._awaited is not None)
    own.engine.post(Disconnected(stream))
    own.tokens(one)
    assert own.engine._pass_ahead._awaited is None
    own.engine.stop()


def awaited_by(scene: Scene, stream: Any) -> AwaitedAnswer:
    awaited = scene.drafting.gate.awaited_answer()
    assert awaited is not None
    assert awaited.stream is stream
    return awaited


def test_the_answer_that_is_awaited_is_the_one_that_brings_all_drafts():
    scene = Scene()
    stream = scene.connect()
    requests = [scene.decode(2 + i) for i in range(3)]
    assert scene.drafting.gate.awaited_answer() is None
    assert not scene.drafting.gate.all_wait(requests)
    scene.flush()
    awaited = awaited_by(scene, stream)
    assert (awaited.requests, awaited.num_drafts) == (requests, [3, 3, 3])
    assert scene.drafting.gate.all_wait(requests)
    assert not scene.drafting.gate.all_wait([])
    answer = answer_to(stream.steps[-1])
    tokens = read_ahead(answer, awaited, VOCAB)
    assert tokens is not None
    assert tokens.tolist() == [5, 6, 7] * 3
    assert read_ahead(answer, awaited, 7) is None  # an id beyond the vocabulary
    for change in (
        lambda one: setattr(one, "step_id", one.step_id + 1),
        lambda one: one.sequence_ids.pop(),
        lambda one: one.num_drafts.__setitem__(0, 2),
        lambda one: setattr(one.tokens, "data", one.tokens.data[:-4]),
    ):
        wrong = pb.Drafts.FromString(answer.SerializeToString())
        change(wrong)
        assert read_ahead(wrong, awaited, VOCAB) is None
    scene.decode(3)
    scene.flush()  # asks for the drafts of another one by another message
    assert scene.drafting.gate.awaited_answer() is None
    scene.answer(stream)
    assert not scene.drafting.gate.all_wait(requests)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_drafts_go_where_their_requests_are_in_the_step(order):
    requests = [make_request([1 + i] * 16) for i in range(4)]
    for request in requests:
        request.blocks, request.num_computed = [4, 5], 15
    requests[3].drafts = ReadyDrafts(16, 4, [8])  # came before
    num_drafts = [3, 1, 2]
    expected = ExpectedStep([*zip(requests, [*num_drafts, 3], strict=True)])
    runner: Any = NoRunner()
    expected.launch(runner)
    assert not expected.can_begin_with
    expected.foresee(requests[:1], [4])  # there is no room for so many
    assert not expected.can_begin_with
    expected.foresee([requests[i] for i in order], [num_drafts[i] for i in order])
    drafts = [[11, 12, 13], [14], [15, 16]]
    expected.begin_with(np.array([token for i in order for token in drafts[i]]))
    assert runner.released == [[1, 11, 12, 13, 2, 14, 3, 15, 16, 4, 8, 0, 0]]
    assert not expected.can_begin_with


@pytest.mark.parametrize("count", [0, 1, K])
def test_fewer_drafts_than_were_asked_for_take_a_part_of_the_rows(target, count):
    own = Noted(target)
    own.connect_late(lambda _: [5, 6, 7][:count])
    made = [own.submit(**one) for one in REQUESTS]
    own.engine.start()
    assert [own.tokens(one) for one in made] == undrafted(target, REQUESTS)
    own.engine.stop()
    assert own.num_begun > 0


def test_a_request_that_arrives_is_computed_although_a_drafter_is_silent(target, monkeypatch):
    monkeypatch.setattr(expected_step, "PATIENCE_S", 0.05)
    own = Noted(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    waiting = own.submit(max_tokens=20)
    own.engine.start()
    own.next(waiting)
    wait_until(lambda: own.held)
    assert own.held
    assert own.tokens(own.submit([2, 7], k=0)) == undrafted(target, [{"prompt": [2, 7]}])[0]
    assert (own.num_begun, own.num_dropped) == (0, 1)  # and not launched again
    own.engine.stop()


def test_a_prompt_does_not_wait_for_the_end_of_requests_whose_drafts_always_come_soon(target, monkeypatch):
    monkeypatch.setattr(StepGate, "_hold_until", lambda _, now, *__: now + WAIT_S)
    own = Noted(target)
    own.connect_late()
    drafting = own.submit(max_tokens=50)
    own.engine.start()
    own.next(drafting)
    own.tokens(own.submit([2, 7], k=0, max_tokens=1))
    assert drafting.verify_steps < 10
    own.tokens(drafting)
    own.engine.stop()


def test_no_step_is_computed_twice_where_the_cache_is_nearly_full(target):
    own = Noted(target, num_blocks=45, max_num_seqs=16, max_queue=16)
    own.connect_late()
    requests = [{"prompt": [3 + i, *range(i)], "max_tokens": 30} for i in range(16)]
    made = [own.submit(**one) for one in requests]
    taken: list[ForwardOutput] = []
    logits_of = ForwardOutput.with_logits_of

    def noted(output: ForwardOutput, rows: Any) -> ForwardOutput:
        taken.append(output)
        return logits_of(output, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardOutput, "with_logits_of", noted)
        own.engine.start()
        assert [own.tokens(one) for one in made] == undrafted(target, requests)
    own.engine.stop()
    assert own.num_begun > 20
    assert len(taken) == own.num_begun


@pytest.mark.parametrize("limits", [{"draft_deadline_s": 0.02}, {}])
def test_a_step_costs_what_all_rows_cost_that_were_computed(target, limits):
    own = Noted(target, **limits)
    computed: list[int] = []
    counted: list[int] = []
    target_cost, forward = own.engine.drafting.gate.target_cost, target.forward

    def noted_forward(token_ids: Any, *arguments: Any) -> Any:
        computed.append(len(token_ids))
        return forward(token_ids, *arguments)

    def observe(rows: int, *_: Any) -> None:
        counted.append(rows)
        if len(counted) == 5:
            own.engine.drafting.gate.part_next()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", noted_forward)
        patch.setattr(target_cost, "observe", observe)
        if limits:
            own.connect().on_send = lambda _: None
        else:
            own.connect_late()
        made = [own.submit(**one) for one in REQUESTS]
        own.engine.start()
        for one in made:
            own.tokens(one)
        own.engine.stop()
    assert own.num_begun > 0
    assert counted == computed[-len(counted) :]
    if not limits:
        assert len(REQUESTS) // 2 * (1 + K) in counted[5:8]


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
    scene.verify(request, 5, 6, 7)
    scene.flush()
    gate = scene.drafting.gate
    assert gate.is_waiting(request)  # until the drafter takes more
    assert (request.num_drafts_wanted, gate.expected_drafts([request])) == (1, [1])


def test_nothing_waits_for_a_held_step_whose_requests_have_all_gone(target):
    own = Noted(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    gone = own.submit(max_tokens=20)
    own.engine.start()
    wait_until(lambda: own.held)
    own.engine.cancel(gone)
    began = time.monotonic()
    assert own.tokens(own.submit([2, 7], k=0)) == undrafted(target, [{"prompt": [2, 7]}])[0]
    assert time.monotonic() < began + expected_step.PATIENCE_S / 2
    assert (own.num_begun, own.num_dropped) == (0, 1)
    own.engine.stop()


def test_a_held_step_that_fails_as_it_begins_ends_its_requests_alone(target, monkeypatch):
    own = Noted(target)
    release = own.runner.release

    def fail_third(token_ids: Any) -> ForwardOutput | None:
        if len(own.held) == 3:
            own.runner.abandon()
            raise RuntimeError("no memory")
        return release(token_ids)

    monkeypatch.setattr(own.runner, "release", fail_third)
    own.connect_late()
    one = own.submit(max_tokens=40)
    own.engine.start()
    assert own.error(one) == "the step failed: no memory"
    assert own.tokens(own.submit([2, 7])) == undrafted(target, [{"prompt": [2, 7]}])[0]
    assert not own.has_failed.is_set()
    own.engine.stop()


def test_a_held_step_does_not_outlive_the_engine(target):
    own = Noted(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    own.submit(max_tokens=20)
    own.engine.start()
    wait_until(lambda: own.held)
    own.engine.stop()
    assert (len(own.held), own.num_begun, own.num_dropped) == (1, 0, 1)


def test_a_cancelled_request_leaves_the_others_of_a_held_step_alone(target):
    own = Noted(target)
    cancelled, other = own.submit(max_tokens=40), own.submit([2, 7], max_tokens=40)

    def drafts_for(_: Any) -> list[int]:
        if len(own.held) >= 4:
            own.engine.cancel(cancelled)
        return [5, 6, 7]

    own.connect_late(drafts_for)
    own.engine.start()
    assert own.tokens(other) == undrafted(target, [{"prompt": [2, 7], "max_tokens": 40}])[0]
    own.engine.stop()
    assert own.num_dropped == 0
    sizes = [len(step.sequences) for step in own.held]
    assert sizes == sorted(sizes, reverse=True), sizes
    assert set(sizes) == {1, 2}
    assert own.engine.kv_cache_usage == 0.0


def test_nothing_is_held_where_steps_land_before_the_next_is_launched(target):
    own = Noted(target, async_scheduling=False)
    own.connect_late()
    own.engine.start()
    own.tokens(own.submit())
    own.engine.stop()
    assert own.held == []


def test_rows_are_those_of_the_requests_and_blocks_that_it_was_launched_for():
    def begun(change: Any = None, num_drafts: int = 3, drafts: tuple[int, ...] = (7, 8)) -> bool:
        """Whether a step with so many drafts of a request of 17 tokens is begun with `drafts` after a change."""
        request = make_request([1] * 16)
        request.tokens.append(1)
        request.blocks, request.num_computed = [4, 5], 16  # blocks of 16 rows
        expected = ExpectedStep([(request, num_drafts)])
        runner: Any = NoRunner()
        expected.launch(runner)
        if change is not None:
            change(request)
        ready = ReadyDrafts(17, 1, list(drafts)) if drafts else None
        work = ScheduledRows(request, 16, [1, *drafts], ready, samples=True)
        assert expected.take([work]) is None  # what the launched step gives
        assert not expected.is_pending
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
