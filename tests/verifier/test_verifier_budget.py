"""The choice of drafts to verify: from calibrated confidences and step times, independent of a draft's own value."""

from __future__ import annotations

import numpy as np
import pytest

from verifier_service.pacing import Calibration, Limit, Profile, StepCosts, VerificationBudget, chosen
from verifier_service.target.graph_sizes import Buckets

K = 7
RATES = np.array([0.80, 0.62, 0.47, 0.34, 0.24, 0.15, 0.10])
"""Unconditional acceptance by position."""
CONDITIONAL = RATES / np.concatenate([[1.0], RATES[:-1]])
BASE_S, ROW_S, FREE_ROWS = 4.6e-3, 14e-6, 64
"""Times of a dense pass of an 8B model. The first FREE_ROWS rows are nearly free: reading the weights takes longer."""
DRAFT_S, HOST_S = 1.4e-3, 0.4e-3


def pass_s(rows: int) -> float:
    return BASE_S + ROW_S * max(0, rows - FREE_ROWS) + 2e-6 * rows


def profile(most: int = 256) -> Profile:
    """Return the table of pass times, as measured at start, for the sizes of captured graphs."""
    buckets = Buckets(most, K + 1, most * (K + 1) + 512).decoding
    return Profile({(bucket.num_sequences, bucket.num_rows): pass_s(bucket.num_rows) for bucket in buckets})


# Calibration.


def test_confidences_are_believed_at_first():
    calibration = Calibration(3)
    confidences = np.array([[0.9, 0.5, 0.25]])
    np.testing.assert_allclose(calibration.acceptance(confidences), confidences)
    np.testing.assert_allclose(calibration.survival(confidences), [[0.9, 0.45, 0.1125]])


def verify(calibration: Calibration, steps: int, truth: np.ndarray, seed: int = 0) -> None:
    """Count steps of 16 sequences. `truth` [positions, 2]: offset and slope of acceptance over confidence in logits."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        confidences = draw.uniform(0.05, 0.95, (16, len(truth)))
        logit = np.log(confidences / (1 - confidences))
        accepted = draw.uniform(size=confidences.shape) < 1 / (1 + np.exp(-(truth[:, 0] + truth[:, 1] * logit)))
        calibration.count(confidences, np.full(16, len(truth)), accepted.cumprod(1).sum(1))


def test_confidences_are_corrected_by_position():
    calibration, truth = Calibration(2), np.array([[-0.7, 0.6], [0.5, 1.5]])
    verify(calibration, 400, truth)
    confidences = np.array([[0.3, 0.3], [0.6, 0.6], [0.8, 0.8]])
    logit = np.log(confidences / (1 - confidences))
    np.testing.assert_allclose(
        calibration.acceptance(confidences), 1 / (1 + np.exp(-(truth[:, 0] + truth[:, 1] * logit))), atol=0.07
    )


def test_a_position_that_is_not_tested_is_believed_again():
    calibration = Calibration(2)
    verify(calibration, 400, np.array([[-2.0, 1.0], [-2.0, 1.0]]))
    low = calibration.acceptance(np.array([[0.7, 0.7]]))[0, 1]
    for _ in range(2000):
        calibration.count(np.full((16, 2), 0.7), np.full(16, 1), np.zeros(16, np.int64))
    assert low < 0.35
    assert calibration.acceptance(np.array([[0.7, 0.7]]))[0, 1] > 0.6


def test_without_confidences_a_position_has_one_rate():
    calibration, draw = Calibration(3), np.random.default_rng(1)
    for _ in range(500):
        accepted = (draw.uniform(size=(16, 3)) < [0.9, 0.5, 0.3]).cumprod(1).sum(1)
        calibration.count(np.full((16, 3), np.nan), np.full(16, 3), accepted)
    np.testing.assert_allclose(calibration.acceptance(np.full((1, 3), np.nan)), [[0.9, 0.5, 0.3]], atol=0.08)


def test_synthetic_confidences_are_right_whatever_is_accepted():
    calibration = Calibration(3, [0.8, 0.5, 0.2])
    verify(calibration, 10, np.zeros((3, 2)))
    assert calibration.survival(np.array([[0.1, 0.2, 0.9]])).tolist() == [pytest.approx([0.1, 0.02, 0.018])]
    assert calibration.survival(np.full((1, 3), np.nan)).tolist() == [pytest.approx([0.8, 0.4, 0.08])]


# Seconds of a pass.


def test_a_pass_takes_what_its_graph_took():
    costs = StepCosts(profile(64))
    assert costs.is_known
    assert costs.seconds(64, 65) == pytest.approx(pass_s(128))  # padded to the next graph
    assert costs.sizes(60, 200).rows.tolist() == [64, 128, 192, 320]


def test_the_table_is_corrected_by_the_steps_that_run():
    costs = StepCosts(profile(64))
    for rows in [128, 192, 320] * 40:
        costs.count(64, rows, pass_s(rows) + 0.5e-3 + 3e-6 * rows)
    for rows in (64, 512):
        assert costs.seconds(64, rows) == pytest.approx(pass_s(rows) + 0.5e-3 + 3e-6 * rows, rel=0.03)


# The choice of drafts.


def test_drafts_are_chosen_by_survival():
    survival = np.array([[0.9, 0.6, 0.3], [0.5, 0.1, 0.05], [0.2, 0.2, 0.1], [0.8, 0.0, 0.0]])
    assert chosen(survival, Limit(0.3, 100)).tolist() == [3, 1, 0, 1]
    assert chosen(survival, Limit(0.0, 100)).tolist() == [3, 3, 3, 1]
    assert chosen(survival, Limit(0.0, 0)).tolist() == [0, 0, 0, 0]


def test_the_likeliest_of_a_position_get_scarce_room():
    survival = np.array([[0.9, 0.6], [0.5, 0.49], [0.7, 0.1]])
    assert chosen(survival, Limit(0.0, 2)).tolist() == [1, 0, 1]
    assert chosen(survival, Limit(0.0, 4)).tolist() == [2, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_no_draft_is_chosen_by_what_comes_behind_it(seed):
    """Changing the confidences after a position, in all sequences, does not change the choice up to that position."""
    draw = np.random.default_rng(seed)
    conditional = draw.uniform(size=(12, 5))
    limit = Limit(draw.uniform(0.0, 0.4), int(draw.integers(0, 50)))
    before = chosen(conditional.cumprod(1), limit)
    for position in range(5):
        changed = conditional.copy()
        changed[:, position + 1 :] = draw.uniform(size=(12, 4 - position))
        after = chosen(changed.cumprod(1), limit)
        upto = position + 1
        assert np.minimum(before, upto).tolist() == np.minimum(after, upto).tolist()


class Served:
    """Simulated steps of `sequences` with K drafts each; with `spread`, confidences differ between sequences."""

    def __init__(self, sequences: int, spread: float = 0.0) -> None:
        self.budget = VerificationBudget(profile(), is_adaptive=True)
        self.sequences, self.spread = sequences, spread
        self.draw = np.random.default_rng(0)
        self.verified: list[float] = []

    def survival(self) -> np.ndarray:
        """Return the survival [sequences, K]; each sequence raises the acceptance by position to a random power."""
        power = np.exp(self.spread * self.draw.standard_normal((self.sequences, K)))
        return np.cumprod(CONDITIONAL**power, axis=1)

    def run(self, rounds: int) -> float:
        """Run `rounds` steps; return the tokens per second."""
        all_tokens = all_seconds = 0.0
        self.verified.clear()
        sizes = profile().sizes(self.sequences)
        for _ in range(rounds):
            survival = self.survival()
            limit = self.budget.limit(self.sequences, self.sequences, self.sequences * K)
            count = np.full(self.sequences, K) if limit is None else chosen(survival, limit)
            rows = int(sizes.rows[np.searchsorted(sizes.rows, self.sequences + count.sum())])
            seconds = pass_s(rows) + DRAFT_S + HOST_S
            self.budget.count_offered(survival)
            self.budget.count_step(self.sequences, rows, pass_s(rows), seconds, has_drafts=True)
            all_tokens += self.sequences + (survival * (np.arange(K) < count[:, None])).sum()
            all_seconds += seconds
            self.verified.append(float(count.mean()))
        return all_tokens / all_seconds


def fixed(sequences: int, num_drafts: int, rates: np.ndarray = RATES) -> float:
    """Return the tokens per second with `num_drafts` drafts of each sequence, in closed form."""
    sizes = profile().sizes(sequences)
    rows = int(sizes.rows[np.searchsorted(sizes.rows, sequences * (1 + num_drafts))])
    return sequences * (1 + rates[:num_drafts].sum()) / (pass_s(rows) + DRAFT_S + HOST_S)


@pytest.mark.parametrize("sequences", [1, 8, 32, 64, 128, 256])
def test_the_budget_is_as_good_as_the_best_number(sequences):
    served = Served(sequences)
    served.run(50)
    assert served.run(100) > 0.98 * max(fixed(sequences, k) for k in range(1, K + 1))


def test_the_budget_falls_with_load():
    means = []
    for sequences in (1, 8, 32, 64, 128, 256):
        served = Served(sequences)
        served.run(50)
        served.run(50)
        means.append(float(np.mean(served.verified)))
    assert means[0] == means[1] == K
    assert means == sorted(means, reverse=True)
    assert means[-1] < K / 2


@pytest.mark.parametrize("sequences", [64, 128, 256])
def test_confidences_that_differ_gain_more(sequences):
    """The budget's rows are used for the drafts that are likely to be accepted."""
    served = Served(sequences, spread=1.0)
    served.run(50)
    rate = served.run(100)
    power = np.exp(np.random.default_rng(5).standard_normal((4096, K)))
    mean = np.cumprod(CONDITIONAL**power, axis=1).mean(0)
    assert rate > 1.02 * max(fixed(sequences, k, mean) for k in range(1, K + 1))


@pytest.mark.parametrize(("table", "is_adaptive"), [(Profile(), True), (profile(), False)], ids=["no table", "fixed k"])
def test_nothing_is_limited_without_a_table_or_by_a_fixed_k(table, is_adaptive):
    served = Served(256)
    served.budget = VerificationBudget(table, is_adaptive=is_adaptive)
    served.run(50)
    assert set(served.verified) == {float(K)}


def test_nothing_is_limited_before_the_first_rounds():
    assert VerificationBudget(profile(), is_adaptive=True).limit(256, 256, 256 * K) is None
