"""Forward passes that are launched before their drafts arrive."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from drafting_scene import CPU, RecordedStream, answer_to, make_request
from engine_scene import WAIT_S, K, Served
from grammar_scene import END, matcher_of
from waiting import wait_for

from draftwire.transport import TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ForwardOutput
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.drafters.stream import Answered, Disconnected
from verifier_service.engine import engine as engine_module
from verifier_service.engine import prelaunch
from verifier_service.engine.executor import Executor
from verifier_service.engine.step import Stage, Step
from verifier_service.pacing import DraftingPolicy, Limit
from verifier_service.target.target import Target

REQUESTS = [{"prompt": [3 + i, 1, 4], "max_tokens": 30 - i} for i in range(4)]


@pytest.fixture(autouse=True)
def one_group(monkeypatch) -> None:
    """Request K drafts in every step, and abandon no pass on a loaded machine."""
    monkeypatch.setattr(DraftingPolicy, "count", lambda policy, _: policy.pin(K))
    monkeypatch.setattr(prelaunch, "PATIENCE_S", WAIT_S)


class CountingEngine(Served):
    """An engine that counts prelaunched steps.

    Attributes
    ----------
    sizes
        Number of requests of each prelaunched step.
    num_released, num_dropped
        Number of steps that got their token ids, and number abandoned before.
    """

    def __init__(self, target: Target, config: dict[str, Any] | None = None, **limits: Any) -> None:
        super().__init__(target, config, **{"async_scheduling": True, **limits})
        self.num_released = self.num_dropped = 0
        self.sizes: list[int] = []
        self._waiting: set[Step] = set()
        self._has_prelaunched = threading.Event()
        self.on_stage(Stage.PRELAUNCHED, self._note_prelaunch)
        self.on_stage(Stage.RELEASED, self._note_release)
        self.on_stage(Stage.ABANDONED, self._note_drop)

    def _note_prelaunch(self, step: Step) -> None:
        self.sizes.append(len(step.rows))
        self._waiting.add(step)
        self._has_prelaunched.set()

    def _note_release(self, step: Step) -> None:
        self.num_released += step in self._waiting
        self._waiting.discard(step)

    def _note_drop(self, step: Step) -> None:
        self.num_dropped += step in self._waiting
        self._waiting.discard(step)

    def connect_late(self, drafts_for: Any = lambda _: [5, 6, 7]) -> Any:
        """Connect a drafter that answers once the step for its drafts is prelaunched, or after 20 ms."""
        stream = self.connect_with(drafts_for)
        answer = stream.on_send
        steps: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def answer_all() -> None:
            while True:
                step = steps.get()
                self._has_prelaunched.wait(0.02)
                answer(step)

        def on_send(step: Any) -> None:
            self._has_prelaunched.clear()
            steps.put(step)

        threading.Thread(target=answer_all, daemon=True).start()
        stream.on_send = on_send
        return stream


def undrafted(target: Target, requests: list[dict[str, Any]]) -> list[list[int]]:
    own = Served(target, max_queue=100)
    return own.run(*(own.submit(**{**one, "k": 0}) for one in requests))


def silent(own: Served) -> RecordedStream:
    """Connect a drafter that never answers."""
    stream = own.connect()
    stream.on_send = lambda _: None
    return stream


@pytest.fixture
def own(target) -> CountingEngine:
    return CountingEngine(target)


@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 9}, {"draft_deadline_s": 0.0005}, {"max_num_seqs": 2}, {"prefix_caching": False}]
)
@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8}, {"presence_penalty": 0.5, "logprobs": 1}])
def test_the_output_is_that_without_drafts(target, limits, kind):
    requests = [{**one, **kind} for one in REQUESTS]
    own = CountingEngine(target, {"draft_sample_method": "gumbel", "rejection_sample_method": "coupled"}, **limits)
    own.connect_late()
    made = [own.submit(**one) for one in requests]
    assert own.run(*made) == undrafted(target, requests)
    assert len(own.sizes) == own.num_released + own.num_dropped
    assert own.num_released > 0 or "draft_deadline_s" in limits
    if not limits:
        assert own.num_released > 0.8 * len(own.sizes)
    assert own.engine.kv_cache_usage == 0.0


@pytest.mark.parametrize("limit", [Limit(0.0, 5), Limit(0.4, 100), Limit(0.0, 0)], ids=str)
def test_the_output_under_a_budget_is_that_without_drafts(target, limit):
    """Steps that verify only some of their drafts are prelaunched too."""
    own = CountingEngine(target, {"draft_sample_method": "gumbel", "rejection_sample_method": "coupled"})
    own.engine.drafting.pin(K, limit)
    own.connect_late()
    rows: list[list[int]] = []
    own.on_stage(Stage.SAMPLED, lambda step: rows.append([row.num_drafts for row in step.rows]))
    made = [own.submit(**one, temperature=0.8) for one in REQUESTS]
    assert own.run(*made) == undrafted(target, [{**one, "temperature": 0.8} for one in REQUESTS])
    assert own.num_released > 0.8 * len(own.sizes) > 0
    assert max(map(sum, rows)) <= limit.most_drafts
    assert any(map(sum, rows)) == (limit.most_drafts > 0)


def test_steps_of_structured_output_run_as_prelaunched(own):
    """Steps verify all of their drafts, those inside the grammar, or none."""
    drafts = itertools.cycle([[0, 1, 2], [0, 10, 2], [10, 0, 0]])
    own.connect_late(lambda _: next(drafts))
    prelaunched, ran = set(), []
    own.on_stage(Stage.PRELAUNCHED, prelaunched.add)
    own.on_stage(
        Stage.SAMPLED, lambda step: ran.append((step in prelaunched, sum(row.num_drafts for row in step.rows)))
    )
    made = []
    for one in REQUESTS:
        request = make_request(one["prompt"], max_tokens=20, stop_token_ids=[END])
        request.grammar = matcher_of({"regex": "[abc]{100}"})
        made.append(own.submit_made(request))
    own.run(*made)
    drafted = [verified for is_prelaunched, verified in ran if is_prelaunched]
    assert len(drafted) == len(own.sizes) >= len(ran) - 2
    assert {0, 4, 12} <= set(drafted)


def test_nearly_every_step_with_drafts_was_prelaunched(target, monkeypatch):
    """A prelaunched step starts before its answer is checked."""
    own, take_answer, taken = CountingEngine(target), Executor.take_answer, []

    def note(executor: Executor, event: Answered) -> bool:
        taken.append(take_answer(executor, event))
        return taken[-1]

    monkeypatch.setattr(Executor, "take_answer", note)
    own.connect_late()
    one = own.submit(max_tokens=40)
    own.run(one)
    assert sum(fallback.tokens for fallback in own.engine.counters().fallbacks) == 1  # the last token needs no drafts
    assert (own.num_released, own.num_dropped) == (one.verify_steps - 1, 0)
    assert taken.count(True) == own.num_released


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        (lambda _: None, True),
        (lambda drafts: drafts.last_tokens.__setitem__(0, 1 + drafts.last_tokens[0]), True),  # continues another token
        (lambda drafts: drafts.statuses.__setitem__(0, pb.SEQUENCE_STATUS_UNKNOWN), True),
        (lambda drafts: setattr(drafts, "compute_time_s", -1.0), True),  # the drafter is expelled
        (lambda drafts: drafts.committed_lengths.append(1), True),
        (lambda drafts: setattr(drafts.tokens, "data", b"\xff" * len(drafts.tokens.data)), False),
        (lambda drafts: drafts.sequence_ids.reverse(), False),
    ],
)
def test_a_step_whose_answer_proves_wrong_comes_to_nothing(target, change, starts, monkeypatch):
    own, take_answer, started = CountingEngine(target), Executor.take_answer, []

    def spoilt(executor: Executor, event: Answered) -> bool:
        is_waiting = executor.prelaunched is not None and not executor.computes_prelaunched
        if not is_waiting or len(event.drafts.sequence_ids) != len(REQUESTS):
            return take_answer(executor, event)
        if len(started) == 2:
            change(event.drafts)
        started.append(take_answer(executor, event))
        return started[-1]

    monkeypatch.setattr(Executor, "take_answer", spoilt)
    own.connect_late()
    made = [own.submit(**one) for one in REQUESTS]
    assert own.run(*made) == undrafted(target, REQUESTS)
    assert started[:3] == [True, True, starts]
    assert len(own.sizes) == own.num_released + own.num_dropped
    assert own.engine.kv_cache_usage == 0.0


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8}])
@pytest.mark.parametrize("wrong", [None, 7, -1])
def test_a_step_starts_with_drafts_in_shared_memory(target, monkeypatch, kind, wrong):
    """A step's result is not used if its early drafts differ from the answer's (one step in three)."""
    monkeypatch.setattr(engine_module, "awake_s", lambda _: WAIT_S)
    own = CountingEngine(target)
    take_early_drafts = Executor.take_early_drafts
    begun, written = [], []

    def noted_early_drafts(executor: Executor) -> bool:
        begun.append(take_early_drafts(executor))
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
            stream.early_drafts = drafts
        steps.put(step)

    steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
    has_begun = threading.Event()
    threading.Thread(target=answer_all, daemon=True).start()
    monkeypatch.setattr(Executor, "take_early_drafts", noted_early_drafts)
    seen, behind = [], []
    monkeypatch.setattr(own.engine.times, "see_drafts", lambda: seen.append(True))
    monkeypatch.setattr(own.engine.times, "count_answer", lambda _, *, is_behind: behind.append(is_behind))
    stream = own.connect()
    stream.is_local, stream.on_send = True, on_send
    stream.sender = TensorSender(CPU, HostSegment.unshared(1 << 20, CPU))
    made = [own.submit(**{**one, **kind}) for one in REQUESTS]
    found = own.run(*made)
    steps.put(None)
    if not kind:
        assert found == undrafted(target, REQUESTS)
    assert len(written) >= len(begun) > 0.7 * len(written) > 7
    assert begun.count(False) == (0 if wrong != -1 else pytest.approx(len(begun) / 3, abs=2))
    assert behind.count(True) >= len(seen) == begun.count(True)
    assert len(own.sizes) == own.num_released + own.num_dropped
    assert own.engine.kv_cache_usage == 0.0


def test_a_waiting_step_does_not_keep_a_drafter_that_has_gone(own):
    stream = silent(own)
    gone = weakref.ref(stream)
    one = own.submit(max_tokens=20)
    with own:
        wait_for(lambda: own.sizes)
        own.engine.post(Disconnected(stream))
        del stream
        own.tokens(one)
        own.tokens(own.submit([2, 7]))  # the engine's thread holds other objects
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("count", [0, 1, K])
def test_fewer_drafts_than_asked_for_take_a_part_of_the_rows(own, target, count):
    own.connect_late(lambda _: [5, 6, 7][:count])
    made = [own.submit(**one) for one in REQUESTS]
    assert own.run(*made) == undrafted(target, REQUESTS)
    assert own.num_released > 0


def test_a_new_request_is_computed_though_a_drafter_is_silent(target, monkeypatch):
    monkeypatch.setattr(prelaunch, "PATIENCE_S", 0.05)
    own = CountingEngine(target)
    silent(own)
    waiting = own.submit(max_tokens=20)
    with own:
        own.next(waiting)
        wait_for(lambda: own.sizes)
        assert own.tokens(own.submit([2, 7], k=0)) == undrafted(target, [{"prompt": [2, 7]}])[0]
        assert (own.num_released, own.num_dropped) == (0, 1)  # and not launched again


def test_a_prompt_does_not_wait_until_drafted_requests_end(target, monkeypatch):
    monkeypatch.setattr(DraftWaitPolicy, "hold_until", lambda _, now, *__: now + WAIT_S)
    own = CountingEngine(target)
    own.connect_late()
    drafting = own.submit(max_tokens=50)
    with own:
        own.next(drafting)
        own.tokens(own.submit([2, 7], k=0, max_tokens=1))
        assert drafting.verify_steps < 10
        own.tokens(drafting)


def test_no_step_is_computed_twice_with_a_nearly_full_cache(target, monkeypatch):
    own = CountingEngine(target, num_blocks=45, max_num_seqs=16, max_queue=16)
    own.connect_late()
    requests = [{"prompt": [3 + i, *range(i)], "max_tokens": 30} for i in range(16)]
    made = [own.submit(**one) for one in requests]
    taken: list[ForwardOutput] = []
    logits_of = ForwardOutput.with_logits_of

    def note(output: ForwardOutput, rows: Any) -> ForwardOutput:
        taken.append(output)
        return logits_of(output, rows)

    expected = undrafted(target, requests)
    monkeypatch.setattr(ForwardOutput, "with_logits_of", note)
    assert own.run(*made) == expected
    assert own.num_released > 20
    assert len(taken) == own.num_released


def test_nothing_waits_for_a_step_whose_requests_have_gone(own, target):
    silent(own)
    gone = own.submit(max_tokens=20)
    with own:
        wait_for(lambda: own.sizes)
        own.engine.cancel(gone)
        began = time.monotonic()
        assert own.tokens(own.submit([2, 7], k=0)) == undrafted(target, [{"prompt": [2, 7]}])[0]
        assert time.monotonic() < began + prelaunch.PATIENCE_S / 2
        assert (own.num_released, own.num_dropped) == (0, 1)


def test_a_released_step_that_fails_ends_its_requests_alone(target):
    own, failed = CountingEngine(target), []

    def fail_third(step: Step) -> None:
        if len(own.sizes) == 3 and not failed:
            failed.append(step)
            raise RuntimeError("no memory")

    own.on_stage(Stage.RELEASED, fail_third)
    own.connect_late()
    one = own.submit(max_tokens=40)
    with own:
        assert own.error(one) == "the step failed: no memory"
        assert own.tokens(own.submit([2, 7])) == undrafted(target, [{"prompt": [2, 7]}])[0]
    assert not own.has_failed.is_set()


def test_a_prelaunched_step_does_not_outlive_the_engine(own):
    silent(own)
    own.submit(max_tokens=20)
    with own:
        wait_for(lambda: own.sizes)
    assert (len(own.sizes), own.num_released, own.num_dropped) == (1, 0, 1)


def test_a_cancelled_request_leaves_the_waiting_step_alone(own, target):
    cancelled, other = own.submit(max_tokens=40), own.submit([2, 7], max_tokens=40)

    def drafts_for(_: Any) -> list[int]:
        if len(own.sizes) >= 4:
            own.engine.cancel(cancelled)
        return [5, 6, 7]

    own.connect_late(drafts_for)
    assert own.run(other) == [undrafted(target, [{"prompt": [2, 7], "max_tokens": 40}])[0]]
    assert own.num_dropped == 0
    assert own.sizes == sorted(own.sizes, reverse=True)
    assert set(own.sizes) == {1, 2}
    assert own.engine.kv_cache_usage == 0.0


def test_nothing_is_prelaunched_without_async_scheduling(target):
    own = CountingEngine(target, async_scheduling=False)
    own.connect_late()
    own.run(own.submit())
    assert own.sizes == []
