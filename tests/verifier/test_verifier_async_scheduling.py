"""Steps that are launched before the tokens of the step before them are known."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from async_scene import Watched, run_all
from drafting_scene import RecordedStream
from engine_scene import K
from tiny_targets import CONTEXT, VOCAB

from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import FutureTokens
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.engine.step import Stage, Step
from verifier_service.pacing import DraftingPolicy
from verifier_service.sampling.sampler import TokenSampler

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
    """Has a drafter take so long for each message, one after another."""
    answer, computing = stream.on_send, ThreadPoolExecutor(1)

    def compute(step: pb.DraftStep) -> None:
        time.sleep(seconds)
        answer(step)

    stream.on_send = lambda step: computing.submit(compute, step)


def test_without_drafts_a_step_is_launched_before_the_last_lands(target):
    ends, own = run_all(target, [{"max_tokens": 20, "k": 0}, {"max_tokens": 12, "k": 0}], is_async=True)
    assert [len(tokens) for tokens, _ in ends] == [20, 12]
    launched = [follows for what, follows, _ in own.log if what == "launch"]
    assert launched == [[None, None], *[[0, 1]] * 11, *[[0]] * 8]
    assert own.num_ahead == 19  # all but the first
    counters = own.engine.counters()
    assert counters.verify_rows == 19 + 11  # no row past an end that was known


def test_an_engine_without_it_launches_nothing_ahead(target):
    _, own = run_all(target, [{"k": 0}], is_async=False)
    assert own.num_ahead == 0


@pytest.mark.parametrize("seed", range(6))
def test_mixed_requests_say_the_same(target, seed):
    draw = random.Random(seed)
    requests = []
    for i in range(12):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 5, 17, 40]))]
        most = CONTEXT - len(prompt)
        requests.append({"prompt": prompt, "keys": 100 * i, "k": 0, "max_tokens": draw.randint(min(3, most), most)})
        requests[-1] |= draw.choice(KINDS) if seed % 2 else KINDS[seed]
    limits = {"num_blocks": draw.choice([9, 33]), "max_prefill_rows": draw.choice([16, 64]), "max_num_seqs": 6}
    expected, _ = run_all(target, requests, is_async=False, **limits)
    found, own = run_all(target, requests, is_async=True, **limits)
    assert found == expected
    assert own.num_ahead > 0
    assert all(not one.is_in_flight for one in own.engine.scheduler.running)


def test_a_row_past_an_end_that_was_not_known_changes_nothing(target):
    plain, _ = run_all(target, [{"k": 0, "max_tokens": 20}], is_async=False)
    stop = plain[0][0][6]
    first = plain[0][0].index(stop)
    requests = [{"k": 0, "max_tokens": 20, "stop_token_ids": [stop]}, {"k": 0, "max_tokens": 20, "prompt": [7, 7]}]
    expected, _ = run_all(target, requests, is_async=False)
    found, own = run_all(target, requests, is_async=True)
    assert found == expected
    assert len(found[0][0]) == first + 1
    assert own.engine.counters().verify_rows == first + 1 + 19  # one more than the output of the request that stopped


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
    requests = [{"k": 0, "max_tokens": 20, **kind}, {"k": 0, "max_tokens": 20, "prompt": [7, 7]}]
    plain, _ = run_all(target, [{key: one[key] for key in ("k", "max_tokens")} for one in requests[:1]], is_async=False)
    expected, _ = run_all(target, requests, is_async=False)
    found, own = run_all(target, requests, is_async=True)
    assert found == expected
    assert own.num_ahead >= 11
    assert "logprobs" in kind or found[0] != plain[0]  # it makes a difference


def test_a_request_that_may_draft_does_not_go_on_without_drafts(target):
    own = Watched(target)
    own.connect()
    one = own.submit(max_tokens=30)
    own.run(one)
    assert own.num_ahead == 0
    causes = Counter({one.cause: one.tokens for one in own.engine.counters().fallbacks})
    assert set(causes) <= {generate_pb2.FALLBACK_CAUSE_LAST_TOKEN}


def test_a_step_before_one_with_prompts_counts_as_such(target, monkeypatch):
    """The host launches the other one before it takes the step's tokens."""
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
    prompts = [[3, 1, 4], [2, 7]]
    expected, _ = run_all(target, [{"prompt": one, "max_tokens": 40, "k": 0} for one in prompts], is_async=False)
    own = Watched(target)
    stream = own.connect()
    answer_late(stream)
    requests = [own.submit(prompt, max_tokens=40) for prompt in prompts]
    assert own.run(*requests) == [tokens for tokens, _ in expected]
    flying: list[list[int]] = []
    overtaken = 0
    for what, _, drafts in own.log:
        if what == "land":
            flying.pop(0)
        else:
            overtaken += any(map(any, flying)) and any(drafts)
            flying.append(drafts)
    assert overtaken == 0


@pytest.mark.parametrize("are_soon", [False, True])
def test_only_prompts_go_before_requests_with_late_drafts(target, are_soon, monkeypatch):
    monkeypatch.setattr(DraftWaitPolicy, "come_soon", lambda *_: are_soon)
    prompts = [[3, 1, 4], *([one] * 40 for one in (5, 6, 7))]
    requests = [{"prompt": one, "max_tokens": 50 if len(one) == 3 else 4, "k": 0} for one in prompts]
    expected, _ = run_all(target, requests, is_async=False)
    own = Watched(target, max_prefill_rows=8)
    stream = own.connect()
    answer_late(stream)
    made = [own.submit(**{**one, "k": K}) for one in requests]
    assert own.run(*made) == [tokens for tokens, _ in expected]
    assert (own.num_prompts_before == 0) == are_soon


def test_a_prompt_waits_for_its_rows_while_drafts_are_awaited(target):
    """They may come in the meantime, and would wait for two steps of the prompt."""
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
    own.engine.start()
    own.next(drafted)
    prompt = own.submit([5] * 56, k=0, max_tokens=4)
    own.tokens(drafted)
    own.tokens(prompt)
    own.engine.stop()
    assert alone > 0
    assert ahead == 0


def test_requests_are_in_every_step_of_a_long_prompt(target):
    requests = [{"k": 0, "max_tokens": 30}, {"k": 0, "prompt": [5] * 50, "max_tokens": 3}]
    expected, _ = run_all(target, requests, is_async=False, max_prefill_rows=8)
    found, own = run_all(target, requests, is_async=True, max_prefill_rows=8)
    assert found == expected
    assert own.num_prompts_before == 0
    launched = [decode for (what, _, _), decode in zip(own.log, own.decode, strict=True) if what == "launch"]
    assert all(any(decode) for decode in launched[1:])
    assert own.num_ahead > 25
    num_chunks = -(-(5 + 50) // 8)
    assert [all(decode) for decode in launched].index(True) == num_chunks  # the prompt is in every step too


def test_prompts_continue_before_their_rows_land_and_keep_order(target):
    prompts = [[5] * 40, [6] * 40]
    requests = [{"k": 0, "prompt": one, "max_tokens": 3} for one in prompts]
    expected, _ = run_all(target, requests, is_async=False, max_prefill_rows=16)
    own = Watched(target, max_prefill_rows=16)
    made = [own.submit(**one) for one in requests]
    launched: list[tuple[int, int]] = []

    def note(step: Step) -> None:
        launched.extend((made.index(row.request), row.start) for row in step.rows if not row.is_decoding)

    own.on_stage(Stage.RELEASED, note)
    assert own.run(*made) == [tokens for tokens, _ in expected]
    assert launched == [(0, 0), (0, 16), (0, 32), (1, 0), (1, 8), (1, 24)]
    assert own.num_ahead == sum(what == "launch" for what, _, _ in own.log) - 1


def test_a_draftable_prompt_continues_once_its_features_are_sent(target):
    """Its first rows land before its next ones are launched; then it has a place, and its features are sent."""
    own = Watched(target, max_prefill_rows=8)
    stream = own.connect()
    one = own.submit([5] * 40, max_tokens=4)
    own.run(one)
    assert [what for what, _, _ in own.log[:4]] == ["launch", "land", "launch", "launch"]
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
    own.engine.start()
    assert "the step failed: lost" in own.error(doomed)
    later = own.submit(k=0, max_tokens=20)
    assert own.tokens(later) == run_all(target, [{"k": 0, "max_tokens": 20}], is_async=False)[0][0][0]
    own.engine.stop()


def test_a_cancelled_request_in_flight_leaves_the_others_alone(target):
    expected = run_all(target, [{"k": 0, "max_tokens": 40, "prompt": [2, 7]}], is_async=False)[0][0][0]
    own = Watched(target)
    cancelled, one = own.submit(k=0, max_tokens=50), own.submit([2, 7], k=0, max_tokens=40)
    own.engine.start()
    for _ in range(3):
        own.next(cancelled)
    own.engine.cancel(cancelled)
    assert own.tokens(one) == expected
    own.engine.stop()
    assert own.engine.kv_cache_usage == 0.0


def test_future_tokens_fill_their_rows_and_a_missing_one_is_zero():
    token_ids = torch.zeros(5, dtype=torch.int64)
    drawn = FutureTokens(np.array([1, 4]), np.array([2, 0]), torch.tensor([-1, 8, 9]))
    drawn.write(token_ids)
    assert token_ids.tolist() == [0, 9, 0, 0, 0]


def test_requests_of_a_drafter_that_is_off_follow_each_other(target, monkeypatch):
    """Nothing is sent to a drafter that is off, so that steps are launched before the tokens of the one before."""
    monkeypatch.setattr(DraftingPolicy, "count", lambda policy, _: policy.pin(0))
    prompts = [[3, 1, 4], [2, 7], [5]]
    expected, _ = run_all(target, [{"prompt": one, "max_tokens": 60, "k": 0} for one in prompts], is_async=False)
    own = Watched(target)
    stream = own.connect()
    requests = [own.submit(prompt, max_tokens=60) for prompt in prompts]
    assert own.run(*requests) == [tokens for tokens, _ in expected]
    launches = [follows for what, follows, _ in own.log if what == "launch"]
    assert own.num_ahead > len(launches) - 10
    assert len(stream.steps) < 5
