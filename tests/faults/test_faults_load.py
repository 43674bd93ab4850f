"""The load detects wrong tokens, wrong distributions and acceptance that does not recover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import load
import numpy as np
import pytest
import torch
from exact_law import Law, Sampling
from exact_pair import VOCAB, Pair
from exact_services import serve_verifier
from load import ENOUGH_SAMPLES, Load, Round, Sample, first_good
from services import Reference
from waiting import wait_for

from verifier_service.target.target import load_target

pytestmark = pytest.mark.xdist_group("faults_quick")


@pytest.fixture(scope="module")
def verifier(pair: Pair) -> Iterator[str]:
    """A verifier without drafters, in this process."""
    target = load_target(pair.target_dir, "target", torch.float32, torch.device("cpu"))
    with serve_verifier(target, {}, []) as address:
        yield address


def test_one_other_token_is_a_failure(verifier: str, reference: Reference, law: Law) -> None:
    right, other = reference.continuations[:2]
    tokens = [*other.tokens[:-1], (other.tokens[-1] + 1) % VOCAB]
    with Load([verifier], [right, replace(other, tokens=tokens)], law, undisturbed=0.0) as running:
        wait_for(lambda: len(running.rounds) > 1, "two rounds of requests")
    assert len(running.failures) == len(running.rounds)


def test_samples_follow_their_own_law_and_refute_another(verifier: str, reference: Reference, law: Law) -> None:
    with Load([verifier], reference.continuations[:1], law, undisturbed=0.0) as running:
        wait_for(lambda: sum(bool(one.tokens) for one in running.samples) >= ENOUGH_SAMPLES, "enough samples")
    drawn = [one.tokens for one in running.samples if one.tokens]
    assert not running.failures
    assert law.refutation(drawn, Sampling()) < 1
    assert law.refutation(drawn, Sampling(temperature=0.6)) > 1  # the minimum of 20 draws of 400 samples was 5.9


def test_a_wrong_law_during_a_fault_is_not_diluted_afterwards(law: Law) -> None:
    wrong, right = _draw(law, Sampling(temperature=0.8), ENOUGH_SAMPLES), _draw(law, Sampling(), 40 * ENOUGH_SAMPLES)
    samples = [*(Sample(1.0, 2.0, tokens) for tokens in wrong), *(Sample(4.0, 5.0, tokens) for tokens in right)]
    over = Load([], [], law, undisturbed=0.0, samples=samples)
    assert over.refutation(began=0.0, ended=3.0) > 1
    assert over.refutation(began=0.0, ended=6.0) < 1, "it is too much for the law of all to tell"


def _draw(law: Law, sampling: Sampling, count: int) -> list[tuple[int, ...]]:
    table = law.law(sampling)
    drawn = np.random.default_rng(1).choice(table.size, size=count, p=table.flatten() / table.sum())
    return list(zip(*(digits.tolist() for digits in np.unravel_index(drawn, table.shape)), strict=True))


def test_only_what_was_under_way_during_a_fault_counts_as_such() -> None:
    assert Sample(began=1.0, ended=3.0).overlaps(2.0, 2.0)
    assert Sample(began=1.0).overlaps(2.0, 4.0), "it has not ended"
    assert not Sample(began=1.0, ended=3.0).overlaps(4.0, 5.0)
    assert not Sample(began=6.0, ended=7.0).overlaps(4.0, 5.0)


def test_a_fault_with_too_few_sampled_outputs_is_refused(
    verifier: str, reference: Reference, law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Load([verifier], reference.continuations[:1], law, undisturbed=0.0) as running:
        running.wait_for_rounds(1)
        monkeypatch.setattr(load, "SAMPLED_AT_ONCE", 1000)
        with pytest.raises(AssertionError, match=r"sampled_during=\d{1,2},"), running.fault("of an instant"):
            pass


def test_no_fault_begins_before_acceptance_is_undisturbed(
    verifier: str, reference: Reference, law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "PATIENCE_S", 5.0)
    with (
        Load([verifier], reference.continuations[:1], law, undisturbed=1.44) as draftless,
        pytest.raises(AssertionError, match=r"acceptance of 1\.44 that drafts in time have"),
    ):
        draftless.measure()


def test_a_good_round_between_bad_ones_is_no_recovery() -> None:
    rounds = [Round(float(began), accepted, verify_steps=10) for began, accepted in enumerate([9, 2, 9, 9, 2, 9, 9])]
    assert not first_good(rounds, 0.85, 3)
    rounds.append(Round(7.0, accepted=9, verify_steps=10))
    assert [one.began for one in first_good(rounds, 0.85, 3)] == [5.0, 6.0, 7.0]
