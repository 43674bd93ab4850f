"""Acceptance rates of the method "synthetic" (source: vLLM PRs 40662 and 41035)."""

import math
from collections.abc import Sequence

import numpy as np

from draftwire_kernels.noise import host_row_state

# Rates of a position that `spread_rates` draws from.
NUM_SPREAD = 16


def acceptance_length_to_rates(length: float, k: int) -> list[float]:
    """Return the unconditional acceptance rates with mean acceptance length `length` and the least variance.

    Parameters
    ----------
    length : float
        Mean tokens emitted per verify step, including the bonus token, in [1, k + 1].
    k : int
        Draft tokens per step, at least 1.

    Returns
    -------
    list of float
        k rates: floor(length - 1) ones, the fraction, then zeros. Entry i is the probability that the first i + 1
        drafts are all accepted, so the rates sum to length - 1.

    Raises
    ------
    ValueError
        If `k` or `length` is out of range.

    Examples
    --------
    >>> acceptance_length_to_rates(2.5, 4)
    [1.0, 0.5, 0.0, 0.0]
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    if not 1 <= length <= k + 1:
        raise ValueError(f"length: got {length}, expected a number in [1, {k + 1}] for k = {k}")
    accepted = length - 1
    return [min(max(accepted - i, 0.0), 1.0) for i in range(k)]


def unconditional_to_conditional_rates(rates: Sequence[float]) -> list[float]:
    """Return the acceptance rates if all earlier drafts were accepted.

    Parameters
    ----------
    rates : sequence of float
        Unconditional rates p_i, each in [0, 1], non-increasing.

    Returns
    -------
    list of float
        c_0 = p_0, c_i = p_i / p_{i-1}, and 0 after a zero.

    Raises
    ------
    ValueError
        If a rate is outside [0, 1] or larger than the previous one.

    Examples
    --------
    >>> unconditional_to_conditional_rates([0.8, 0.4, 0.0, 0.0])
    [0.8, 0.5, 0.0, 0.0]
    """
    conditional = []
    previous = 1.0
    for i, rate in enumerate(rates):
        if math.isnan(rate) or not 0 <= rate <= 1:
            raise ValueError(f"rates[{i}]: got {rate}, expected a number in [0, 1]")
        if rate > previous:
            raise ValueError(f"rates[{i}]: got {rate} after {previous}, expected non-increasing rates")
        conditional.append(rate / previous if previous > 0 else 0.0)
        previous = rate
    return conditional


def spread_rates(rates: Sequence[float], skill: float) -> list[list[float]]:
    """Return equally likely acceptance rates for each position, whose mean is the position's rate.

    They are the means of equally likely parts of a beta distribution. A draft's rate is the confidence of a calibrated
    forecaster with the Brier skill score `skill`.

    Parameters
    ----------
    rates : sequence of float
        Rate of each position, in [0, 1].
    skill : float
        Share of the variance of acceptance that the rates explain, in [0, 1): the variance of the distribution is
        `skill` * rate * (1 - rate). With 0 all rates of a position are equal.

    Returns
    -------
    list of list of float
        [k][N] ascending, with N = 1 if `skill` is 0, else 16.

    Examples
    --------
    >>> spread_rates([0.5], 0.0)
    [[0.5]]
    """
    if skill == 0:
        return [[rate] for rate in rates]
    sampled = np.random.default_rng(0)
    spread = []
    for rate in rates:
        own = np.full(NUM_SPREAD, float(rate))
        if 0 < rate < 1:
            weight = 1 / skill - 1
            drawn = sampled.beta(rate * weight, (1 - rate) * weight, size=NUM_SPREAD * 4096)
            own = np.sort(drawn).reshape(NUM_SPREAD, -1).mean(1)
            # The mean of a sample differs from the rate.
            own = own * (rate / own.mean()) if own.mean() > rate else 1 - (1 - own) * ((1 - rate) / (1 - own.mean()))
        spread.append(own.tolist())
    return spread


def draft_rates(rates: np.ndarray, accept: np.ndarray, position: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the rates with which `rejection_sample` accepts drafts by the method "synthetic", on the host.

    The choice among a position's rates is independent of the uniform that the rate is compared to.

    Parameters
    ----------
    rates : numpy.ndarray
        [k, N], N equally likely rates of each position, N a power of two.
    accept : numpy.ndarray
        [D] int64, key of the ACCEPT stream of each draft's request.
    position : numpy.ndarray
        [D] int64, absolute position of each draft.
    offset : numpy.ndarray
        [D] int64, offset of each draft in its step.

    Returns
    -------
    numpy.ndarray
        [D], of the dtype of `rates`.
    """
    num_rates = rates.shape[1]
    if num_rates == 1:
        return rates[offset, 0]
    return rates[offset, (host_row_state(accept, position, offset) & np.uint64(num_rates - 1)).astype(np.int64)]
