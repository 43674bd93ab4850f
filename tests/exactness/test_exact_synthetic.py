"""Synthetic acceptance has the configured rates, and the statistics mark it as synthetic."""

from __future__ import annotations

from typing import Any

import pytest
from exact_cases import MAX_DEVIATIONS
from exact_law import Law
from exact_services import sample, serve_verifier

from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_wrong")

K = 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("setting", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.1]}, (0.8, 0.5, 0.1)),
        ({"synthetic_acceptance_length": 2.3}, (1.0, 0.3, 0.0)),
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.1], "synthetic_confidence_skill": 0.5}, (0.8, 0.5, 0.1)),
    ],
    ids=["rates", "length", "drawn rates"],
)
def test_acceptance_is_as_configured(
    setting: dict[str, Any],
    rates: tuple[float, ...],
    temperature: float,
    laws: list[Law],
    target: Target,
    drafters: dict[str, str],
) -> None:
    config = {"num_speculative_tokens": K, "rejection_sample_method": "synthetic", **setting}
    with serve_verifier(target, config, [drafters["full"]]) as address:
        samples = sample(address, laws[0].prompt, range(400), max_tokens=20, temperature=temperature)
    assert all(one.statistics.synthetic_acceptance for one in samples)
    for position, rate in enumerate(rates):
        drafted = sum(one.statistics.drafted[position] for one in samples)
        accepted = sum(one.statistics.accepted[position] for one in samples)
        assert drafted > 1000
        assert abs(accepted - rate * drafted) <= MAX_DEVIATIONS * (drafted * rate * (1 - rate)) ** 0.5
