"""Stream keys from seeds, and the schedules of synthetic acceptance."""

import numpy as np
import pytest
import torch

import draftwire_kernels
from draftwire_kernels import (
    acceptance_length_to_rates,
    derive_stream_keys,
    draft_rates,
    rejection_sample,
    spread_rates,
    unconditional_to_conditional_rates,
)


def test_keys_are_a_fixed_function_of_the_seed() -> None:
    keys = derive_stream_keys([7, -1, 7])
    assert all(key.dtype == torch.int64 and key.shape == (3,) for key in keys)
    assert keys.proposal.tolist() == [2856419013137890689, 6325961076659473509, 2856419013137890689]


def test_streams_and_seeds_have_different_keys() -> None:
    keys = torch.cat(list(derive_stream_keys([*range(-500, 500), 2**63 - 1, -(2**63)])))
    assert keys.unique().numel() == keys.numel() == 3 * 1002


def test_noise_version_is_an_int() -> None:
    assert isinstance(draftwire_kernels.NOISE_VERSION, int)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, None, "7"])
def test_a_seed_that_is_no_signed_64_bit_integer_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match=r"seeds\[1\]: got .*expected an integer in \[-2\*\*63, 2\*\*63 - 1\]"):
        derive_stream_keys([0, seed])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [(1, 3, [0, 0, 0]), (4, 3, [1, 1, 1]), (3, 4, [1, 1, 0, 0]), (2.25, 3, [1, 0.25, 0]), (1.5, 1, [0.5])],
)
def test_acceptance_length_is_spread_with_the_least_variance(length: float, k: int, rates: list[float]) -> None:
    assert acceptance_length_to_rates(length, k) == rates


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan"), float("inf")])
def test_an_acceptance_length_outside_its_range_is_refused(length: float) -> None:
    with pytest.raises(ValueError, match=r"length: got .*expected a number in \[1, 4\] for k = 3"):
        acceptance_length_to_rates(length, 3)


def test_no_drafts_have_no_rates() -> None:
    with pytest.raises(ValueError, match="k: got 0, expected at least 1"):
        acceptance_length_to_rates(1, 0)


def test_conditional_rates_are_quotients_and_zero_after_a_zero() -> None:
    assert unconditional_to_conditional_rates([0.8, 0.4, 0.1, 0.0, 0.0]) == pytest.approx([0.8, 0.5, 0.25, 0, 0])
    assert unconditional_to_conditional_rates([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.5, 0.6], r"rates\[1\]: got 0.6 after 0.5, expected non-increasing"),
        ([1.2], r"rates\[0\]: got 1.2, expected a number in \[0, 1\]"),
        ([0.5, -0.1], r"rates\[1\]: got -0.1"),
        ([float("nan")], r"rates\[0\]: got nan"),
    ],
)
def test_rates_that_are_no_schedule_are_refused(rates: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unconditional_to_conditional_rates(rates)


def test_without_skill_a_position_has_one_rate() -> None:
    assert spread_rates([0.8, 0.0], 0.0) == [[0.8], [0.0]]


@pytest.mark.parametrize("skill", [0.05, 0.15, 0.5, 0.9])
def test_spread_rates_have_mean_and_variance(skill: float) -> None:
    means = [0.02, 0.5, 0.8, 0.97, 0.0, 1.0]
    rates = torch.tensor(spread_rates(means, skill), dtype=torch.float64)
    assert rates.shape == (6, 16)
    assert (rates.diff(dim=1) >= 0).all()
    assert ((rates >= 0) & (rates <= 1)).all()
    torch.testing.assert_close(rates.mean(1), torch.tensor(means, dtype=torch.float64), rtol=0, atol=1e-12)
    wanted = torch.tensor([skill * mean * (1 - mean) for mean in means], dtype=torch.float64)
    variance = rates.var(1, correction=0)
    assert (variance <= wanted + 1e-4).all()  # the means of parts vary less than the distribution
    assert (variance[1:3] >= 0.95 * wanted[1:3]).all()


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_at_their_own_rates(temperature: float, use_fp64: bool) -> None:
    """The acceptance of drafts with each rate; all rates are equally frequent."""
    n, rates = 20_000, torch.tensor([[0.1, 0.3, 0.6, 0.95]])
    keys = derive_stream_keys(range(n))
    result = rejection_sample(
        torch.randn(1, 7, generator=torch.Generator().manual_seed(2)).expand(2 * n, -1),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(n + 1, dtype=torch.int32) * 2,
        torch.full((n,), temperature),
        keys,
        torch.arange(n),
        method="synthetic",
        synthetic_rates=rates,
        use_fp64=use_fp64,
    )
    own = draft_rates(rates.numpy(), keys.accept.numpy(), np.arange(n), np.zeros(n, np.int64))
    for rate in rates[0].tolist():
        has_rate = torch.from_numpy(own == np.float32(rate))
        count = int(has_rate.sum())
        assert abs(count - n / 4) <= 4.5 * (n * 3 / 16) ** 0.5
        accepted = int((result.num_emitted[has_rate] == 2).sum())
        assert abs(accepted - rate * count) <= 4.5 * (count * rate * (1 - rate)) ** 0.5
