"""A budget that selects drafts by confidence keeps the output's distribution; one that sees the drafts does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_cases import Case
from exact_law import LENGTH, Law, Sampling
from exact_services import Sample, sample, serve_verifier

from verifier_service.drafters import answer_intake
from verifier_service.drafters.answers import DecodedAnswer, decode_answer
from verifier_service.pacing import Calibration, Limit
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_budget")

REQUESTS = 1200
MORE_REQUESTS = 6000
"""For the mutant: samples of the target replace the drafts that are not verified, so the bias is small."""
BLOWN = 2.0
"""Least ratio of chi-square statistic and quantile for a mutant."""
LIMIT = Limit(least_survival=0.4, most_drafts=10**6)
LOWER = Limit(least_survival=0.3, most_drafts=10**6)
"""For confidences near 0.4: calibration depends on the order of steps and may move them across that limit."""
SCARCE = Limit(least_survival=0.0, most_drafts=60)
CASES = [
    (Case("dense"), LIMIT),
    (Case("dense"), SCARCE),
    (Case("dense", sampling=Sampling(temperature=0.6)), LIMIT),
    (Case("dense", head="reduced", prompt=1, k=4), LOWER),
    (Case("dense", method="block"), LIMIT),
    (Case("top-3", head="reduced", method="block", prompt=1), SCARCE),
    (Case("top-3"), LIMIT),
    (Case("greedy", seeded=False), LOWER),
    (Case("gumbel", prompt=1, seeded=False), LOWER),
]


def share_verified(samples: list[Sample]) -> float:
    """Return the share of verify steps whose first draft was verified."""
    drafted = np.sum([one.statistics.drafted for one in samples], axis=0)
    steps = sum(one.statistics.verify_steps for one in samples)
    return float(drafted[0] / steps)


@pytest.mark.parametrize(("case", "limit"), CASES, ids=str)
def test_samples_follow_the_target_with_a_budget(
    case: Case, limit: Limit, laws: list[Law], target: Target, drafters: dict[str, str]
) -> None:
    law = laws[case.prompt]
    with serve_verifier(target, case.config(), [drafters[case.head]], limit=limit) as address:
        samples = sample(address, law.prompt, case.seeds(REQUESTS), max_tokens=LENGTH, **case.sampling.options())
    ratio, share = law.refutation([one.tokens for one in samples], case.sampling), share_verified(samples)
    print(f"{ratio:.2f} of the threshold, {share:.2f} of the first drafts verified")
    assert ratio < 1
    assert 0.2 < share < 0.9


def confidence_of_the_draft(*args: Any, **options: Any) -> DecodedAnswer:
    """Replace each confidence by the probability of its draft."""
    decoded = decode_answer(*args, **options)
    if decoded.logits is None:
        return decoded
    probabilities = decoded.logits.values.softmax(-1)
    own = probabilities.gather(1, torch.tensor(decoded.tokens)[:, None])[:, 0]
    return decoded._replace(confidences=own.tolist())


def test_a_budget_by_the_probability_of_the_draft_fails(
    laws: list[Law], target: Target, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration is off, because it would give such confidences little weight."""
    monkeypatch.setattr(answer_intake, "decode_answer", confidence_of_the_draft)
    monkeypatch.setattr(Calibration, "acceptance", lambda _, confidences: confidences)
    assert refutation(laws, target, drafters) > BLOWN


def refutation(laws: list[Law], target: Target, drafters: dict[str, str]) -> float:
    case = Case("dense", sampling=Sampling(temperature=0.6))
    law = laws[case.prompt]
    with serve_verifier(target, case.config(), [drafters[case.head]], limit=LIMIT) as address:
        samples = sample(
            *(address, law.prompt, case.seeds(MORE_REQUESTS)), max_tokens=LENGTH, **case.sampling.options()
        )
    ratio = law.refutation([one.tokens for one in samples], case.sampling)
    print(f"{ratio:.1f}, {share_verified(samples):.2f} of the first drafts verified")
    return ratio
