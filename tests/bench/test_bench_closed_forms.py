"""Closed forms of acceptance rates, checked by simulation and by hand."""

from __future__ import annotations

import pytest
import torch

from draftwire_bench.acceptance import closed_forms

SAMPLES = 200_000


@pytest.fixture(scope="module")
def generator():
    return torch.Generator().manual_seed(1)


@pytest.fixture(scope="module")
def pair(generator):
    """Distributions p and q over 6 tokens; q is zero for two of them."""
    p = torch.randn(6, dtype=torch.float64, generator=generator).softmax(-1)
    logits = torch.randn(6, dtype=torch.float64, generator=generator)
    logits[[1, 4]] = -torch.inf
    return p, logits.softmax(-1)


def race(distribution, noise):
    """Return Gumbel-max samples: the first arrivals of exponential clocks."""
    return (noise / distribution).argmin(-1)


def close_to(rate):
    return pytest.approx(rate, abs=4 * (rate * (1 - rate) / SAMPLES) ** 0.5)


def test_coupled_is_how_often_races_with_equal_noise_agree(pair, generator):
    p, q = pair
    noise = torch.empty(SAMPLES, 6, dtype=torch.float64).exponential_(generator=generator)
    agreement = (race(p, noise) == race(q, noise)).double().mean().item()
    assert agreement == close_to(closed_forms.coupled(p, q).item())
    assert agreement > 1.05 * closed_forms.one_hot(p, q).item()  # so the simulation tells them apart


def test_coupled_lies_between_independence_and_the_best_coupling(pair):
    p, q = pair
    assert closed_forms.one_hot(p, q) < closed_forms.coupled(p, q) < closed_forms.with_logits(p, q)
    assert closed_forms.coupled(p, p).item() == pytest.approx(1.0)


def test_coupled_of_disjoint_and_of_certain_distributions():
    p, q = torch.tensor([[1.0, 0, 0], [1, 0, 0]]).double(), torch.tensor([[0, 0.5, 0.5], [1, 0, 0]]).double()
    assert closed_forms.coupled(p, q).tolist() == [0.0, 1.0]


def test_one_hot_is_how_often_independent_draws_are_equal(pair, generator):
    p, q = pair
    first = torch.multinomial(p, SAMPLES, replacement=True, generator=generator)
    second = torch.multinomial(q, SAMPLES, replacement=True, generator=generator)
    assert (first == second).double().mean().item() == close_to(closed_forms.one_hot(p, q).item())


def test_with_logits_is_one_minus_total_variation(pair):
    p, q = pair
    assert closed_forms.with_logits(p, q).item() == pytest.approx(1 - (p - q).abs().sum().item() / 2)


def test_block_accepts_no_less_than_one_draft_after_the_other():
    p, q = torch.tensor([[0.9, 0.2, 0.6]]).double(), torch.tensor([[0.3, 0.4, 0.2]]).double()
    assert closed_forms.block(p, q)[0].tolist() == pytest.approx([1.0, 0.5, 1.0])  # 3, 1/2, 1/2 * 3 capped at 1
    one_by_one = (p / q).clamp_max(1).cumprod(-1)
    assert (closed_forms.block(p, q) >= one_by_one).all()


def test_temperature_zero_puts_all_mass_on_the_best_token():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert closed_forms.probabilities(logits, 0.0).tolist() == [[0, 1, 0]]
    assert closed_forms.probabilities(logits, 2.0)[0].tolist() == pytest.approx(
        (logits[0].double() / 2).softmax(-1).tolist()
    )


def test_a_draft_vocabulary_is_spread_over_the_targets():
    q = closed_forms.draft_probabilities(torch.tensor([[0.0, 0.0]]), 1.0, torch.tensor([3, 1]), 5)
    assert q.tolist() == [[0, 0.5, 0, 0.5, 0]]
    assert closed_forms.at_draft(q, torch.tensor([3])).tolist() == [0.5]
