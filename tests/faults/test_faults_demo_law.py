"""The soak's test of short sampled outputs: correct outputs pass, and outputs of a faulty verification do not."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from demo_law import DemoLaw, laws_after
from soak import DEMO, LAW_PROMPTS, LAW_SAMPLES_A_MINUTE

pytestmark = pytest.mark.xdist_group("faults_quick")

Output = tuple[int, ...]
# Share of second and third tokens that are the most likely draft, accepted without a test.
TAKEN_UNTESTED = 0.5


@pytest.fixture(scope="module")
def laws() -> list[DemoLaw]:
    return laws_after(LAW_PROMPTS, DEMO / "target")


@pytest.mark.parametrize("number", range(len(LAW_PROMPTS)))
def test_what_follows_the_law_passes(laws: list[DemoLaw], number: int) -> None:
    law = laws[number]
    assert sum(law.laws[-1].values()) == pytest.approx(1)
    assert law.refutation(_draw(law, taken_untested=0.0)) < 1


@pytest.mark.parametrize("number", range(len(LAW_PROMPTS)))
def test_drafts_that_are_taken_untested_refute_the_law(laws: list[DemoLaw], number: int) -> None:
    assert laws[number].refutation(_draw(laws[number], TAKEN_UNTESTED)) > 1


def test_a_token_that_cannot_be_sampled_refutes_the_law(laws: list[DemoLaw]) -> None:
    outputs = _draw(laws[0], taken_untested=0.0)
    assert laws[0].refutation([*outputs, (*outputs[0][:-1], -1)]) == float("inf")


def _draw(law: DemoLaw, taken_untested: float) -> list[Output]:
    """Draw as many outputs as 20 minutes of the soak must have, with this share of drafts accepted without a test."""
    draw, nexts = random.Random(1), defaultdict(dict)
    for known in law.laws:
        for begin, chance in known.items():
            nexts[begin[:-1]][begin[-1]] = chance
    outputs = []
    for _ in range(20 * LAW_SAMPLES_A_MINUTE):
        output: Output = ()
        for position in range(len(law.laws)):
            chances = nexts[output]
            token = draw.choices(list(chances), list(chances.values()))[0]
            if position in (1, 2) and draw.random() < taken_untested:
                token = max(chances, key=chances.__getitem__)
            output = (*output, token)
        outputs.append(output)
    return outputs
