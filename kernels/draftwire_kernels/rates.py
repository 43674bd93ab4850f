"""Acceptance rates of the method "synthetic" (source: vLLM PRs 40662 and 41035)."""

import math
from collections.abc import Sequence


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
