"""Outputs do not depend on drafts, other requests, pacing or preemption."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from drafting_scene import RecordedStream
from engine_scene import WAIT_S, K, Served
from tiny_targets import CONTEXT, VOCAB

from draftwire.model.block_pool import blocks_for
from draftwire_kernels import RejectionResult, rejection_sample
from verifier_service.core.request import Request
from verifier_service.drafters import placement
from verifier_service.drafters.stream import Disconnected
from verifier_service.pacing import DraftingPolicy
from verifier_service.sampling import sampler
from verifier_service.target.target import Target

pytestmark = pytest.mark.usefixtures("scheduling")

PROMPTS = [[(3 * i + j * j) % VOCAB for j in range(1 + 2 * i)] for i in range(6)]
LENGTH = 24
GUMBEL = {"draft_sample_method": "gumbel"}
BLOCK = {"rejection_sample_method": "block"}
COUPLED = {"rejection_sample_method": "coupled"}


def outputs(own: Served, **options: Any) -> tuple[list[list[int]], list[Request]]:
    """Run all seeded requests at once; return their tokens and the requests."""
    options = {"max_tokens": LENGTH, "temperature": 0.9, **options}
    made = [own.submit(prompt, keys=100 * i, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
    tokens = own.run(*made)
    return tokens, made


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    """The tokens of each request alone, without drafts."""
    with Served(target) as own:
        tokens = [
            own.tokens(own.submit(prompt, keys=100 * i, seed=i, max_tokens=LENGTH, temperature=0.9))
            for i, prompt in enumerate(PROMPTS)
        ]
    assert len({tuple(one) for one in tokens}) == len(PROMPTS)
    return tokens


@pytest.fixture(scope="module")
def favourites(expected: list[list[int]]) -> list[int]:
    """The most frequent tokens: as drafts, some of them are accepted."""
    counts = Counter(token for tokens in expected for token in tokens)
    return [token for token, _ in counts.most_common(2 * K)]


def connect(own: Served, favourites: list[int]) -> RecordedStream:
    return own.connect_with(lambda step: [favourites[(step.step_id + j) % len(favourites)] for j in range(K)])


def assert_drafts_decided(made: list[Request]) -> None:
    assert 0 < sum(sum(one.accepted) for one in made) < sum(sum(one.drafted) for one in made)


@pytest.mark.parametrize(
    "config",
    [{}, *(pytest.param(one, marks=pytest.mark.full) for one in (BLOCK, GUMBEL, COUPLED, {**GUMBEL, **COUPLED}))],
    ids=str,
)
def test_drafts_change_no_token(config, target, expected, favourites):
    own = Served(target, config)
    connect(own, favourites)
    found, made = outputs(own)
    assert found == expected
    assert_drafts_decided(made)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"k": 0}, {"k": 1}, {"k": 2}, {"draft_deadline_s": 0.0005}, {"draft_deadline_s": 0.5}, {"max_num_seqs": 2}],
    ids=str,
)
def test_the_number_of_drafts_changes_no_token(options, target, expected, favourites):
    """The cases include pacing and late drafts."""
    limits = {name: value for name, value in options.items() if name != "k"}
    own = Served(target, **limits)
    connect(own, favourites)
    assert outputs(own, k=options.get("k", K))[0] == expected


@pytest.mark.full
def test_preemption_changes_no_token(target, expected, favourites):
    texts = []
    for num_blocks in (len(PROMPTS) * blocks_for(CONTEXT), blocks_for(CONTEXT)):
        own = Served(target, num_blocks=num_blocks + 1)
        connect(own, favourites)
        texts.append(outputs(own, max_tokens=CONTEXT - max(map(len, PROMPTS)))[0])
        assert (own.engine.scheduler.num_preemptions > 0) == (num_blocks == blocks_for(CONTEXT))
    assert texts[0] == texts[1]
    assert [tokens[:LENGTH] for tokens in texts[0]] == expected


def test_the_death_of_a_drafter_changes_no_token(target, expected, favourites):
    own = Served(target)

    def drafts_for(step: Any) -> list[int]:
        if step.step_id == 8:
            own.engine.post(Disconnected(stream))
        return favourites[:K]

    stream = own.connect_with(drafts_for)
    found, made = outputs(own)
    assert found == expected
    assert 0 < sum(one.drafted[0] for one in made) < sum(one.verify_steps for one in made) / 2


@pytest.mark.full
def test_a_number_of_drafts_that_jumps_changes_no_token(target, expected, favourites, monkeypatch):
    """At each step the number is a random one from 0 to K; sequences are closed at the drafter and opened again."""
    draw = random.Random(0)
    monkeypatch.setattr(placement, "MAX_PAUSED_ROWS", 0)
    monkeypatch.setattr(DraftingPolicy, "count", lambda policy, _: policy.pin(draw.randrange(K + 1)))
    own = Served(target, draft_deadline_s=WAIT_S)
    stream = connect(own, favourites)
    found, made = outputs(own)
    assert found == expected
    assert_drafts_decided(made)
    assert {wanted for step in stream.steps for wanted in step.num_drafts} == set(range(K + 1))
    assert any(step.closed_ids for step in stream.steps[:-1])  # sequences were closed before the end


@pytest.mark.full
def test_company_without_seeds_changes_no_token(target, expected, favourites):
    own = Served(target, max_num_seqs=8, max_queue=20)
    connect(own, favourites)
    company = [
        own.submit(prompt, keys=7000 + i, max_tokens=5 + 4 * i, temperature=0.3 * i) for i, prompt in enumerate(PROMPTS)
    ]
    assert outputs(own)[0] == expected
    assert all(one.num_output > 0 for one in company)


def one_hot_test(*batch: Any, **options: Any) -> RejectionResult:
    return rejection_sample(*batch, **{**options, "method": "standard"})


def noise_of_the_last_position(*batch: Any, **options: Any) -> RejectionResult:
    """Sample each request with the noise of its position plus its number of drafts."""
    *rows, position = batch
    return rejection_sample(*rows, position + batch[2].diff() - 1, **options)


@pytest.mark.full
@pytest.mark.parametrize("mutant", [one_hot_test, noise_of_the_last_position])
def test_a_law_that_knows_of_drafts_is_found_out(
    mutant: Callable[..., RejectionResult], target, expected, favourites, monkeypatch
):
    monkeypatch.setattr(sampler, "rejection_sample", mutant)
    own = Served(target)
    connect(own, favourites)
    found, made = outputs(own)
    assert_drafts_decided(made)
    assert found != expected
    assert outputs(Served(target))[0] == expected, "without drafts it is the same"


LONG_PROMPTS = [[(3 * i + j * j) % VOCAB for j in range(1 + 3 * i)] for i in range(8)]
# A case whose output depends on which steps have drafts has no drafts; see the seeded tests of the system.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "greedy with penalties": ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4}),
    "coupled": ({**GUMBEL, **COUPLED}, {"temperature": 0.9}),
    "sampled with penalties": ({}, {"temperature": 0.9, "k": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7}),
}


def long_outputs(
    target: Target, config: dict[str, Any], options: dict[str, Any], num_blocks: int, prefix_caching: bool
) -> tuple[Any, int]:
    """Return the outputs of eight long simultaneous requests, and the number of preemptions."""
    own = Served(target, config, num_blocks=num_blocks + 1, max_prefill_rows=20, prefix_caching=prefix_caching)
    stream = own.connect()
    requests = [
        own.submit(prompt, keys=100 * i, max_tokens=CONTEXT - len(prompt), **options)
        for i, prompt in enumerate(LONG_PROMPTS)
    ]
    tokens = own.run(*requests)
    assert stream.failure is None
    if options.get("k") != 0:
        assert all(sum(one.drafted) > 0 for one in requests)
    assert [one.num_output for one in requests] == [CONTEXT - len(prompt) for prompt in LONG_PROMPTS]
    return tokens, own.engine.scheduler.num_preemptions


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_output_is_the_same_with_and_without_preemption(case, target):
    config, options = CASES[case]
    expected, none = long_outputs(target, config, options, 8 * blocks_for(CONTEXT), prefix_caching=False)
    assert none == 0
    assert len({tuple(tokens) for tokens in expected}) == len(LONG_PROMPTS)
    for num_blocks, prefix_caching in ((blocks_for(CONTEXT), False), (2 * blocks_for(CONTEXT) + 1, True)):
        found, preemptions = long_outputs(target, config, options, num_blocks, prefix_caching)
        assert found == expected
        assert preemptions > 0


def test_a_preempted_sequence_is_closed_and_opened_from_row_0(target):
    own = Served(target, num_blocks=blocks_for(CONTEXT) + 1)
    stream = own.connect()
    requests = [own.submit(LONG_PROMPTS[1], max_tokens=CONTEXT - 4) for _ in range(2)]
    first, second = own.run(*requests)
    assert first == second
    opened = [row for step in stream.steps for row in step.opened.first_rows]
    closed = [i for step in stream.steps for i in step.closed_ids]
    assert own.engine.scheduler.num_preemptions > 0
    assert len(opened) == 2 + own.engine.scheduler.num_preemptions
    assert opened == [0] * len(opened)
    assert closed[: own.engine.scheduler.num_preemptions] == [2, *range(3, len(opened))]
    next_row: dict[int, int] = {}
    for step in stream.steps:
        for i, first, count in zip(step.sequence_ids, step.first_rows, step.num_rows, strict=True):
            assert first == next_row.get(i, 0)
            next_row[i] = first + count
