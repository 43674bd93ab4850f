"""The load's own checks: what a fault must not do would show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from exact_law import Law, Sampling
from exact_pair import VOCAB, Pair
from exact_services import serve_verifier
from load import ENOUGH_SAMPLES, Load, Round, first_good
from services import Reference, wait_for

from verifier_service.target import load_target

pytestmark = pytest.mark.xdist_group("faults_quick")


@pytest.fixture(scope="module")
def verifier(pair: Pair) -> Iterator[str]:
    """One without drafters, in this process."""
    target = load_target(pair.target_dir, "target", torch.float32, torch.device("cpu"))
    with serve_verifier(target, {}, []) as address:
        yield address


def test_one_other_token_is_a_failure(verifier: str, reference: Reference, law: Law) -> None:
    right, other = reference.continuations[:2]
    tokens = [*other.tokens[:-1], (other.tokens[-1] + 1) % VOCAB]
    with Load([verifier], [right, replace(other, tokens=tokens)], law) as load:
        wait_for(lambda: len(load.rounds) > 1, "two rounds of requests")
    assert len(load.failures) == len(load.rounds)


def test_samples_follow_their_own_law_and_refute_another(verifier: str, reference: Reference, law: Law) -> None:
    with Load([verifier], reference.continuations[:1], law) as load:
        wait_for(lambda: len(load.samples) >= ENOUGH_SAMPLES, "enough samples")
    drawn = [tokens for _, tokens in load.samples]
    assert not load.failures
    assert law.refutation(drawn, Sampling()) < 1
    assert law.refutation(drawn, Sampling(temperature=0.8)) > 1


def test_a_good_round_between_bad_ones_is_no_recovery() -> None:
    rounds = [Round(float(began), accepted, verify_steps=10) for began, accepted in enumerate([9, 2, 9, 9, 2, 9, 9])]
    assert not first_good(rounds, 0.85)
    rounds.append(Round(7.0, accepted=9, verify_steps=10))
    assert [one.began for one in first_good(rounds, 0.85)] == [5.0, 6.0, 7.0]
