"""Steps that are launched before the tokens of the previous step are known, and output that is held back."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting_scene import RecordedStream, make_request
from engine_scene import K, Served
from grammar_scene import matcher_of
from tiny_targets import CONTEXT, VOCAB

from draftwire.contract.errors import ServerError
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import FutureTokens, SampledTokens, ScheduledRows
from verifier_service.core.stop_conditions import Piece
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.drafters.drafting import Drafting
from verifier_service.engine import executor
from verifier_service.engine.outputs import RequestOutputs, response
from verifier_service.engine.step import Stage, Step
from verifier_service.pacing import DraftingPolicy
from verifier_service.sampling import sampler
from verifier_service.sampling.sampler import TokenSampler
from verifier_service.target import runner
from verifier_service.target.target import Target


class Watched(Served):
    """An engine with async scheduling that logs launched and committed steps.

    Attributes
    ----------
    log
        ("launch" or, when committed, "land"; rows of the step), oldest first.
    """

    def __init__(self, target: Target, config: dict[str, Any] | None = None, **limits: Any) -> None:
        super().__init__(target, config, **{"async_scheduling": True, "max_queue": 100, **limits})
        self.log: list[tuple[str, tuple[ScheduledRows, ...]]] = []
        self.on_stage(Stage.SAMPLED, lambda step: self.log.append(("launch", tuple(step.rows))))
        self.on_stage(Stage.COMMITTED, lambda step: self.log.append(("land", tuple(step.rows))))

    @property
    def launched(self) -> list[tuple[ScheduledRows, ...]]:
        """Return the rows of each launched step."""
        return [rows for what, rows in self.log if what == "launch"]

    @property
    def launched_beside(self) -> list[tuple[tuple[ScheduledRows, ...], tuple[ScheduledRows, ...]]]:
        """Return, for each step that was launched while another was in flight, the rows of both steps."""
        in_flight: list[tuple[ScheduledRows, ...]] = []
        found = []
        for what, rows in self.log:
            if what == "land":
                in_flight.pop(0)
            else:
                found += [(rows, *in_flight)] if in_flight else []
                in_flight.append(rows)
        return found

    @property
    def num_ahead(self) -> int:
        """Return the number of launches while another step was in flight."""
        return len(self.launched_beside)

    @property
    def num_prompts_before(self) -> int:
        """Return the number of launches of only prompts while a step with decoding requests was in flight."""
        return sum(decodes(flying) and not decodes(rows) for rows, flying in self.launched_beside)


def decodes(rows: tuple[ScheduledRows, ...]) -> bool:
    """Return whether a step has at least one decoding request."""
    return any(row.is_decoding for row in rows)


def run_all(
    target: Target, requests: list[dict[str, Any]], *, is_async: bool = True, **limits: Any
) -> tuple[list[Any], Watched]:
    """Return tokens and finish reasons of requests that arrive together, and their engine."""
    own = Watched(target, async_scheduling=is_async, **limits)
    made = [own.submit(**{"k": 0, **options}) for options in requests]
    with own:
        ends = [own.messages(one) for one in made]
    return [([token for one in its for token in one.token_ids], its[-1].finish_reason) for its in ends], own


def plain(target: Target, requests: list[dict[str, Any]], **limits: Any) -> list[Any]:
    """Return tokens and finish reasons without async scheduling and drafts."""
    ends, own = run_all(target, [{**one, "k": 0} for one in requests], is_async=False, **limits)
    assert own.num_ahead == 0
    return ends


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"stop_token_ids": [9, 15]},
    {"stop_token_ids": [9, 15], "min_tokens": 3},
    {"logprobs": 2},
)


def answer_late(stream: RecordedStream, seconds: float = 0.001) -> None:
    """Let a drafter take `seconds` for each message, one message after another."""
    answer, computing = stream.on_send, ThreadPoolExecutor(1)

    def compute(step: pb.DraftStep) -> None:
        time.sleep(seconds)
        answer(step)

    stream.on_send = lambda step: computing.submit(compute, step)


def test_without_drafts_a_step_is_launched_before_the_last_lands(target):
    ends, own = run_all(target, [{"max_tokens": 20}, {"max_tokens": 12}])
    assert [len(tokens) for tokens, _ in ends] == [20, 12]
    assert [[row.follows for row in rows] for rows in own.launched] == [[None, None], *[[0, 1]] * 11, *[[0]] * 8]
    assert own.num_ahead == 19  # all but the first
    counters = own.engine.counters()
    assert counters.verify_rows == 19 + 11  # no row after the known end of a request


@pytest.mark.parametrize("seed", range(6))
def test_mixed_requests_say_the_same(target, seed):
    draw = random.Random(seed)
    requests = []
    for i in range(12):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 5, 17, 40]))]
        most = CONTEXT - len(prompt)
        requests.append({"prompt": prompt, "keys": 100 * i, "max_tokens": draw.randint(min(3, most), most)})
        requests[-1] |= draw.choice(KINDS) if seed % 2 else KINDS[seed]
    limits = {"num_blocks": draw.choice([9, 33]), "max_prefill_rows": draw.choice([16, 64]), "max_num_seqs": 6}
    found, own = run_all(target, requests, **limits)
    assert found == plain(target, requests, **limits)
    assert own.num_ahead > 0
    assert all(not one.is_in_flight for one in own.engine.scheduler.running)


def test_a_row_past_an_end_that_was_not_known_changes_nothing(target):
    ((tokens, _),) = plain(target, [{"max_tokens": 20}])
    stop = tokens[6]
    first = tokens.index(stop)
    requests = [{"max_tokens": 20, "stop_token_ids": [stop]}, {"max_tokens": 20, "prompt": [7, 7]}]
    found, own = run_all(target, requests)
    assert found == plain(target, requests)
    assert len(found[0][0]) == first + 1
    assert own.engine.counters().verify_rows == first + 1 + 19  # with one unused row of the request that stopped


@pytest.mark.parametrize(
    "kind",
    [
        {"logprobs": 3},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.8},
        {"temperature": 0.9, "presence_penalty": 0.5},
        {"stop_token_ids": list(range(10)), "min_tokens": 12},
    ],
    ids=str,
)
def test_a_draw_that_needs_earlier_tokens_does_not_wait_for_them(target, kind):
    requests = [{"max_tokens": 20, **kind}, {"max_tokens": 20, "prompt": [7, 7]}]
    found, own = run_all(target, requests)
    assert found == plain(target, requests)
    assert own.num_ahead >= 11
    assert "logprobs" in kind or found[:1] != plain(target, [{"max_tokens": 20}])  # the parameters change the output


def test_a_request_that_may_draft_does_not_go_on_without_drafts(target):
    own = Watched(target)
    own.connect()
    one = own.submit(max_tokens=30)
    own.run(one)
    assert own.num_ahead == 0
    causes = Counter({one.cause: one.tokens for one in own.engine.counters().fallbacks})
    assert set(causes) <= {generate_pb2.FALLBACK_CAUSE_LAST_TOKEN}


def test_a_step_before_one_with_prompts_counts_as_such(target, monkeypatch):
    """The host launches the step with prompts before it reads the tokens of the previous step."""
    own = Watched(target)
    counted_prompts: list[bool] = []
    drafting = own.engine.drafting
    count_step = drafting.count_step

    def note(*, has_prompts: bool, **others: Any) -> None:
        counted_prompts.append(has_prompts)
        count_step(has_prompts=has_prompts, **others)

    monkeypatch.setattr(drafting, "count_step", note)
    launched: list[bool] = []

    def launching(step: Step) -> None:
        if len(launched) == 10:
            own.submit([2, 7], k=0, max_tokens=30)
        launched.append(step.has_prompts)

    own.on_stage(Stage.SAMPLED, launching)
    one = own.submit([3, 1, 4], k=0, max_tokens=40)
    own.run(one)
    assert sum(launched[5:]) == 1
    counted = min(len(counted_prompts), len(launched) - 1)
    assert counted_prompts[:counted] == [any(two) for two in pairwise(launched)][:counted]
    assert counted > 20


def test_drafts_do_not_overtake_a_step_of_their_drafter(target):
    requests = [{"prompt": one, "max_tokens": 40} for one in ([3, 1, 4], [2, 7])]
    own = Watched(target)
    answer_late(own.connect())
    made = [own.submit(**one) for one in requests]
    assert own.run(*made) == [tokens for tokens, _ in plain(target, requests)]
    assert not any(
        any(row.num_drafts for row in rows) and any(row.num_drafts for row in flying)
        for rows, flying in own.launched_beside
    )


@pytest.mark.parametrize("are_soon", [False, True])
def test_only_prompts_go_before_requests_with_late_drafts(target, are_soon, monkeypatch):
    monkeypatch.setattr(DraftWaitPolicy, "come_soon", lambda *_: are_soon)
    prompts = [[3, 1, 4], *([one] * 40 for one in (5, 6, 7))]
    requests = [{"prompt": one, "max_tokens": 50 if len(one) == 3 else 4} for one in prompts]
    own = Watched(target, max_prefill_rows=8)
    answer_late(own.connect())
    made = [own.submit(**one) for one in requests]
    assert own.run(*made) == [tokens for tokens, _ in plain(target, requests)]
    assert (own.num_prompts_before == 0) == are_soon


def test_a_prompt_waits_for_its_rows_while_drafts_are_awaited(target):
    """Drafts may arrive meanwhile, and would have to wait for two steps of the prompt."""
    own = Watched(target, max_prefill_rows=8)
    stream = own.connect()
    answer_late(stream, 0.02)
    alone, ahead = 0, 0

    def note(step: Step) -> None:
        nonlocal alone, ahead
        if own.engine.drafting.wait_policy.is_awaited:
            alone += not any(row.is_decoding for row in step.rows)
            ahead += any(row.request.is_in_flight for row in step.rows)

    own.on_stage(Stage.RELEASED, note)
    drafted = own.submit(max_tokens=12)
    with own:
        own.next(drafted)
        own.tokens(own.submit([5] * 56, k=0, max_tokens=4))
        own.tokens(drafted)
    assert alone > 0
    assert ahead == 0


def test_requests_are_in_every_step_of_a_long_prompt(target):
    requests = [{"max_tokens": 30}, {"prompt": [5] * 50, "max_tokens": 3}]
    found, own = run_all(target, requests, max_prefill_rows=8)
    assert found == plain(target, requests, max_prefill_rows=8)
    assert own.num_prompts_before == 0
    assert all(map(decodes, own.launched[1:]))
    assert own.num_ahead > 25
    num_chunks = -(-(5 + 50) // 8)
    has_prompt = [not all(row.is_decoding for row in rows) for rows in own.launched]
    assert has_prompt.index(False) == num_chunks  # each of the first steps has rows of a prompt


def test_prompts_continue_before_their_rows_land_and_keep_order(target):
    requests = [{"prompt": [token] * 40, "max_tokens": 3} for token in (5, 6)]
    found, own = run_all(target, requests, max_prefill_rows=16)
    assert found == plain(target, requests, max_prefill_rows=16)
    pieces = [(row.request.prompt[0], row.start) for rows in own.launched for row in rows if not row.is_decoding]
    assert pieces == [(5, 0), (5, 16), (5, 32), (6, 0), (6, 8), (6, 24)]
    assert own.num_ahead == len(own.launched) - 1


def test_a_draftable_prompt_continues_once_its_features_are_sent(target):
    """The first chunk is committed before the second is launched: the request needs a place at the drafter first."""
    own = Watched(target, max_prefill_rows=8)
    stream = own.connect()
    one = own.submit([5] * 40, max_tokens=4)
    own.run(one)
    assert [what for what, _ in own.log[:4]] == ["launch", "land", "launch", "launch"]
    sent = [count for step in stream.steps for count in step.num_rows]
    assert sum(sent[:5]) == 40
    assert len(sent) > 5


def test_a_failed_step_ends_its_requests_and_not_the_next(target, monkeypatch):
    own = Watched(target)
    finish, calls = TokenSampler.finish, []

    def failing(sampler: TokenSampler, output: Any) -> Any:
        calls.append(output)
        if len(calls) == 4:
            raise RuntimeError("lost")
        return finish(sampler, output)

    monkeypatch.setattr(TokenSampler, "finish", failing)
    doomed = own.submit(k=0, max_tokens=20)
    with own:
        assert "the step failed: lost" in own.error(doomed)
        later = own.submit(k=0, max_tokens=20)
        assert own.tokens(later) == plain(target, [{"max_tokens": 20}])[0][0]


def test_a_cancelled_request_in_flight_leaves_the_others_alone(target):
    own = Watched(target)
    cancelled, one = own.submit(k=0, max_tokens=50), own.submit([2, 7], k=0, max_tokens=40)
    with own:
        for _ in range(3):
            own.next(cancelled)
        own.engine.cancel(cancelled)
        assert own.tokens(one) == plain(target, [{"max_tokens": 40, "prompt": [2, 7]}])[0][0]
    assert own.engine.kv_cache_usage == 0.0


def test_future_tokens_fill_their_rows_and_a_missing_one_is_zero():
    token_ids = torch.zeros(5, dtype=torch.int64)
    drawn = FutureTokens(np.array([1, 4]), np.array([2, 0]), torch.tensor([-1, 8, 9]))
    drawn.write(token_ids)
    assert token_ids.tolist() == [0, 9, 0, 0, 0]


def test_requests_of_a_drafter_that_is_off_follow_each_other(target, monkeypatch):
    """A drafter that is off gets no messages, so steps are launched before the previous step's tokens are known."""
    monkeypatch.setattr(DraftingPolicy, "count", lambda policy, _: policy.pin(0))
    requests = [{"prompt": prompt, "max_tokens": 60} for prompt in ([3, 1, 4], [2, 7], [5])]
    expected = plain(target, requests)
    own = Watched(target)
    stream = own.connect()
    made = [own.submit(**one) for one in requests]
    assert own.run(*made) == [tokens for tokens, _ in expected]
    assert own.num_ahead > len(own.launched) - 10
    assert len(stream.steps) < 5


def test_output_waits_a_few_steps_while_the_device_waits_for_us():
    nothing: Any = None
    delivered: list[Any] = []
    outputs = RequestOutputs(
        *(nothing, nothing, nothing, delivered.append, nothing, torch.device("cpu")), is_synthetic=False
    )

    def is_held(step: Step | None) -> bool:
        delivered.clear()
        outputs.refuse(nothing, ServerError("an item"))
        outputs.deliver_behind(step)
        return not delivered

    late, early = Step((), is_late=True), Step(())
    assert [is_held(late) for _ in range(9)] == [True, True, True, False, True, True, True, False, True]
    assert not is_held(early)
    assert not is_held(None)  # no step follows
    assert [is_held(late) for _ in range(4)] == [True, True, True, False]


class Event:
    """An event of a device that is only done when the host has waited for it."""

    is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


@pytest.mark.parametrize("is_drafted", [False, True])
def test_each_step_on_a_gpu_is_counted_once(target, monkeypatch, is_drafted):
    for module in (executor, runner, sampler):
        monkeypatch.setattr(module, "record_event", lambda _: Event())
    counted: list[float] = []
    monkeypatch.setattr(Drafting, "count_step", lambda _, landed, **__: counted.append(landed))
    own = Watched(target)
    if is_drafted:
        own.connect()
    own.run(*(own.submit([n, 2], max_tokens=20, k=K * is_drafted) for n in range(3)))
    landed = [what for what, _ in own.log if what == "land"]
    assert len(counted) == len(set(counted)) == len(landed) > 5


def test_masks_that_wait_for_tokens_hold_no_output_back(target, monkeypatch):
    for module in (executor, runner, sampler):
        monkeypatch.setattr(module, "record_event", lambda _: Event())
    own = Watched(target)
    request = make_request([1, 2], max_tokens=20)
    request.grammar = matcher_of({"regex": "[ab]{50}"})
    own.submit_made(request)
    with own:
        assert [len(message.token_ids) for message in own.messages(request)] == [1] * 20
    assert own.num_ahead > 10


@pytest.mark.parametrize("kind", [{}, {"logprobs": 1, "k": K}, {"k": K}])
def test_output_that_is_held_back_loses_nothing(target, kind, monkeypatch):
    def deliver_sometimes(outputs: RequestOutputs, *_: Any) -> None:
        if own.engine.times.read().steps % 4 == 0:
            outputs.deliver()

    monkeypatch.setattr(RequestOutputs, "deliver_behind", deliver_sometimes)
    requests = [{"max_tokens": 30, "k": 0, **kind}, {"prompt": [2, 7], "max_tokens": 22, "k": 0, **kind}]
    own = Watched(target)
    if "k" in kind:
        own.connect()
    made = [own.submit(**one) for one in requests]
    with own:
        messages = [own.messages(one) for one in made]
    monkeypatch.undo()
    for one, its, (tokens, _) in zip(made, messages, plain(target, requests), strict=True):
        assert [token for item in its for token in item.token_ids] == tokens
        assert len(its) < one.verify_steps
        assert its[-1].statistics.verify_tokens == len(tokens) - 1
        assert sum(flag for item in its for flag in item.drafted) == sum(its[-1].statistics.accepted)
        if "logprobs" in kind:
            assert sum(len(item.logprobs) for item in its) == len(tokens)


def test_a_message_may_have_the_tokens_of_several_steps():
    def rows(tokens: list[int], num_drafts: int = 0, **end: Any) -> Any:
        piece = Piece(tokens, **end)
        return SimpleNamespace(num_drafts=num_drafts, sampled=SampledTokens(tokens), piece=piece, statistics=None)

    last = rows([9], finish_reason=generate_pb2.FINISH_REASON_STOP, stop_token_id=9)
    message = response([rows([5]), rows([6, 7, 8], num_drafts=2), last])
    assert list(message.token_ids) == [5, 6, 7, 8, 9]
    assert list(message.drafted) == [False, True, True, False, False]
    assert (message.finish_reason, message.stop_token_id) == (generate_pb2.FINISH_REASON_STOP, 9)
