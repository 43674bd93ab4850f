"""Samples through both services follow the target's law, and acceptance matches its closed form."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from exact_cases import MAX_DEVIATIONS, Case, count_first_drafts
from exact_law import LENGTH, Law, Sampling
from exact_pair import Pair
from exact_services import Sample, sample, sample_prompts, serve_verifier, wait_for_drafters

from draftwire.v1 import generate_pb2
from draftwire_bench.processes import start_verifier
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_law")

REQUESTS = 1200
FILTERED = Sampling(temperature=0.6, top_p=0.9, min_p=0.03, repetition_penalty=1.2, frequency_penalty=0.3)
PENALISED = Sampling(temperature=1.3, top_k=6, presence_penalty=0.6)
MASKED = Sampling(allowed_token_ids=(0, 1, 2, 4, 5, 7), bad_word_ids=((5,), (1, 1), (2, 4), (0, 7), (7, 1, 0)))
MASKED_TOO = Sampling(temperature=0.8, top_p=0.95, bad_word_ids=((3, 3), (6,), (1, 2, 1), (0,), (4, 4), (7, 2)))

CASES = [
    Case("greedy", seeded=False),
    Case("greedy", head="reduced", prompt=1, seeded=False),
    Case("greedy", sampling=FILTERED, seeded=False),
    Case("gumbel", prompt=1, seeded=False),
    Case("gumbel", head="reduced", k=4, seeded=False),
    Case("gumbel", sampling=PENALISED, seeded=False),
    Case("greedy", sampling=MASKED, seeded=False),
    Case("gumbel", sampling=MASKED_TOO, prompt=1, seeded=False),
    Case("dense", k=4),
    Case("dense", head="reduced", prompt=1),
    Case("dense", sampling=FILTERED),
    Case("dense", sampling=MASKED, k=4),
    Case("dense", use_fp64=True, prompt=1),
    Case("top-3"),
    Case("top-2", head="reduced", sampling=PENALISED),
    Case("dense", method="block"),
    Case("top-3", head="reduced", method="block", prompt=1),
    Case("greedy", head="dspark", seeded=False),
    Case("gumbel", head="dspark", sampling=FILTERED, seeded=False),
    Case("dense", head="dspark", k=4),
    Case("top-3", head="dspark", prompt=1, sampling=FILTERED),
    Case("dense", head="dspark", method="block", prompt=1, k=4),
]
# Requests have seeds, and drafts have no logits.
INDEPENDENT_OF_DRAFTS = [
    Case("greedy"),
    Case("greedy", head="reduced", prompt=1, k=4),
    Case("greedy", sampling=FILTERED),
    Case("gumbel", sampling=PENALISED),
    Case("greedy", sampling=MASKED),
    Case("greedy", method="coupled", prompt=1),
    Case("gumbel", method="coupled", prompt=1),
    Case("gumbel", head="reduced", method="coupled", sampling=FILTERED),
    Case("greedy", head="dspark", k=4),
    Case("gumbel", head="dspark", method="coupled", prompt=1),
]


def check(samples: list[Sample], case: Case, law: Law) -> None:
    """Check the law, and the acceptance of first drafts against its closed form."""
    ratio = law.refutation([one.tokens for one in samples], case.sampling)
    assert ratio < 1
    assert not any(one.statistics.synthetic_acceptance for one in samples)
    assert sum(len(one.step_sizes) > 2 for one in samples) > len(samples) / 4, "hardly a request took two verify steps"
    first = count_first_drafts(samples, case, law)
    assert first.drafted == sum(one.statistics.drafted[0] for one in samples)
    assert first.accepted == sum(one.statistics.accepted[0] for one in samples)
    print(f"{ratio:.2f} of the threshold, first drafts accepted {first.accepted / first.drafted:.3f}")
    assert 0.2 < first.accepted / first.drafted < 0.8
    if case.method != "block":
        assert first.deviations < MAX_DEVIATIONS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_follow_the_target(case: Case, laws: list[Law], target: Target, drafters: dict[str, str]) -> None:
    law = laws[case.prompt]
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        samples = sample(address, law.prompt, case.seeds(REQUESTS), max_tokens=LENGTH, **case.sampling.options())
    check(samples, case, law)


@pytest.mark.parametrize("case", INDEPENDENT_OF_DRAFTS, ids=str)
def test_samples_follow_the_target_and_do_not_depend_on_drafts(
    case: Case, laws: list[Law], target: Target, drafters: dict[str, str]
) -> None:
    law, options = laws[case.prompt], case.sampling.options()
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        drafted = sample(address, law.prompt, range(REQUESTS), max_tokens=LENGTH, **options)
        alone = sample(address, law.prompt, range(400), max_tokens=LENGTH, num_speculative_tokens=0, **options)
    check(drafted, case, law)
    assert all(one.step_sizes == (1,) * LENGTH for one in alone)
    assert [one.tokens for one in alone] == [one.tokens for one in drafted[: len(alone)]]


def test_samples_of_two_processes_follow_the_target(pair: Pair, laws: list[Law], drafters: dict[str, str]) -> None:
    """Requests with two prompts share batches; requests without drafts follow."""
    case = Case("dense")
    with start_verifier(
        pair.target_dir,
        [drafters[case.head]],
        *("--speculative-config", json.dumps(case.config()), "--draft-deadline-ms", "off"),
        *("--max-num-seqs", "256", "--device", "cpu"),
    ) as verifier:
        wait_for_drafters(verifier.address, generate_pb2.DRAFTER_STATE_READY)
        requests = [(law.prompt, seed) for seed in range(REQUESTS) for law in laws]
        samples = sample_prompts(verifier.address, requests, max_tokens=LENGTH)
        prompt, seeds = laws[0].prompt, range(REQUESTS, 2 * REQUESTS)
        undrafted = sample(verifier.address, prompt, seeds, max_tokens=LENGTH, num_speculative_tokens=0)
    for number, law in enumerate(laws):
        check(samples[number :: len(laws)], replace(case, prompt=number), law)
    assert laws[0].refutation([one.tokens for one in undrafted], case.sampling) < 1
    assert all(one.step_sizes == (1,) * LENGTH for one in undrafted)
