"""The acceptance of each method equals its closed form for the same steps, recomputed in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact_pair import Pair
from exact_services import sample_prompts, serve_verifier

from draftwire_bench.acceptance.acceptance import METHODS, Cell, Method, evaluate
from draftwire_bench.acceptance.recomputation import Continuation, Models
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_closed_forms")

K = 3
OUTPUT = 24
SEEDS = 200
PROMPTS = ((3, 0, 6, 6, 4, 1), (7, 7, 2))  # of different lengths, so that a batch is padded
# With six cells of three positions, one run in a thousand has such a deviation by chance.
MAX_Z = 4.0
# The tiny target has eight tokens, so its top 3 replace the top 64 of a large vocabulary.
TINY = [
    replace(method, config={**method.config, "draft_logits": {"top_n": 3}}) if "top" in method.name else method
    for method in METHODS
]
BY_NAME = {method.name: method for method in TINY}


@pytest.fixture(scope="module")
def models(pair: Pair) -> Models:
    return Models(pair.target_dir, pair.head_dirs["reduced"], torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def dspark_models(pair: Pair) -> Models:
    return Models(pair.target_dir, pair.head_dirs["dspark"], torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def served(target: Target, drafters: dict[str, str]):
    """A function that returns continuations by method, temperature and head, and serves each combination once."""
    made: dict[tuple[str, float, str], list[Continuation]] = {}

    def continuations(method: Method, temperature: float, head: str = "reduced") -> list[Continuation]:
        key = (method.name, temperature, head)
        if key not in made:
            requests = [(PROMPTS[seed % len(PROMPTS)], seed) for seed in range(SEEDS)]
            config = {**method.config, "num_speculative_tokens": K}
            with serve_verifier(target, config, [drafters[head]]) as address:
                samples = sample_prompts(
                    address, requests, max_tokens=OUTPUT, temperature=temperature, ignore_eos=True
                )
            made[key] = [
                Continuation(tuple(prompt), one.tokens, one.accepted, seed)
                for (prompt, seed), one in zip(requests, samples, strict=True)
            ]
        return made[key]

    return continuations


def deviations(cell: Cell) -> list[float]:
    return [abs(position.z) for position in cell.positions if position.z is not None]


@pytest.mark.parametrize("method", TINY, ids=lambda method: method.name.replace(" ", "_"))
def test_acceptance_is_the_closed_form(method, served, models):
    cell = evaluate(models, method, 1.0, K, served(method, 1.0))
    assert cell.unlike == 0
    assert cell.steps > 4 * SEEDS
    assert len(deviations(cell)) == K
    assert max(deviations(cell)) < MAX_Z


@pytest.mark.parametrize("name", ["gumbel dense", "greedy one-hot", "block dense"])
def test_acceptance_of_a_dspark_head_is_the_closed_form(name, served, dspark_models):
    method = BY_NAME[name]
    cell = evaluate(dspark_models, method, 1.0, K, served(method, 1.0, "dspark"))
    assert cell.unlike == 0
    assert max(deviations(cell)) < MAX_Z


def test_greedy_accepts_each_draft_that_the_closed_form_accepts(served, models):
    method = BY_NAME["gumbel dense"]
    cell = evaluate(models, method, 0.0, K, served(method, 0.0))
    assert cell.unlike == 0
    assert deviations(cell) == []
    assert [position.accepted for position in cell.positions] == [position.expected for position in cell.positions]


@pytest.mark.parametrize(
    ("name", "wrong_law"), [("gumbel one-hot", "1 - TV"), ("gumbel dense", "sum p q"), ("coupled", "sum p q")]
)
def test_another_methods_closed_form_is_found_out(name, wrong_law, served, models):
    method = replace(BY_NAME[name], law=wrong_law)
    cell = evaluate(models, method, 1.0, K, served(BY_NAME[name], 1.0))
    assert max(deviations(cell)) > 2 * MAX_Z


def test_one_hot_tests_accept_greedy_drafts_more_often(served, models):
    rates = {
        name: evaluate(models, BY_NAME[name], 1.0, K, served(BY_NAME[name], 1.0)).rate
        for name in ("gumbel one-hot", "greedy one-hot", "coupled", "gumbel dense")
    }
    assert rates["gumbel one-hot"] < rates["greedy one-hot"] < rates["gumbel dense"]
    assert rates["gumbel one-hot"] < rates["coupled"] < rates["gumbel dense"]


