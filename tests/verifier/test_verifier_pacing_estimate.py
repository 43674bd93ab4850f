"""Costs that are linear in what causes them, learnt from noisy observations."""

from __future__ import annotations

import random

import pytest
from learnt_costs import ROW_BYTES, learnt_drafter, observe, tokens_at

from verifier_service.pacing import Forecast, Load, TargetCost
from verifier_service.pacing.estimate import CHANGE_AFTER, LinearEstimate


def test_a_line_is_learnt_from_noisy_observations():
    noise = random.Random(0)
    estimate = LinearEstimate((1.0, 0.0), 0.1)
    for i in range(200):
        x = noise.choice([1, 10, 100])
        estimate.observe((1.0, x), (5 + 0.02 * x) * noise.uniform(0.95, 1.05), 0.01 * i)
    assert estimate.weights == pytest.approx([5, 0.02], rel=0.1)
    assert estimate.noise < 0.3


def test_a_step_costs_something_even_where_its_features_take_the_blame_for_all():
    target = TargetCost()
    erratic = [(8, 0, 1e-3), (8, 600, 0.1), (1, 200, 1e-5), (200, 600, 1e-3), (200, 600, 1e-5)]
    for i, (rows, feature_rows, seconds) in enumerate(erratic):
        target.observe(rows, feature_rows, seconds, 0.001 * i)
    assert target.seconds(100) == target.fixed > 0
    forecast = Forecast(Load(1, ROW_BYTES), tokens_at(0.7), target, learnt_drafter(1e-3))
    assert forecast.without > 0


def test_the_slope_learnt_before_is_kept_while_the_load_does_not_change():
    estimate = LinearEstimate((1.0, 0.0), 0.1)
    for i in range(20):
        x = (1, 100)[i % 2]
        estimate.observe((1.0, x), 5 + 0.05 * x, 0.01 * i)
    for i in range(1000):
        estimate.observe((1.0, 1), 5.05, 0.2 + 0.01 * i)
    assert estimate.predict((1.0, 100)) == pytest.approx(10, rel=0.02)
    assert estimate.uncertainty((1.0, 100)) > estimate.uncertainty((1.0, 1))


def test_a_single_outlier_moves_nothing_and_a_change_is_believed_after_a_few():
    estimate = LinearEstimate((1.0, 0.0), 0.1)
    for i in range(50):
        estimate.observe((1.0, 10), 1.0 + 0.02 * (i % 2), 0.01 * i)
    estimate.observe((1.0, 10), 50.0, 0.5)
    assert estimate.predict((1.0, 10)) == pytest.approx(1.01, abs=0.1)
    for i in range(50):
        estimate.observe((1.0, 10), 1.0 + 0.02 * (i % 2), 0.51 + 0.01 * i)
    for i in range(CHANGE_AFTER + 2):
        estimate.observe((1.0, 10), 9.0, 1.1 + 0.01 * i)
    assert estimate.predict((1.0, 10)) == pytest.approx(9.0, rel=0.1)


def test_a_step_that_stalls_is_forgotten_even_if_it_is_the_first_with_drafts():
    """As one does in which a kernel is compiled: its seconds are not what feature rows cost from then on."""
    noise = random.Random(0)
    target = TargetCost()
    for i in range(100):
        target.observe(1, 0, 5.7e-3 * noise.uniform(0.97, 1.03), 0.01 * i)
    target.observe(5, 3, 2.0, 1.0)
    for i in range(20):
        target.observe(5, 3, 6.9e-3 * noise.uniform(0.97, 1.03), 3.0 + 0.01 * i)
    assert target.seconds(5) + 3 * target.per_feature_row == pytest.approx(6.9e-3, rel=0.05)
    assert target.fixed > 3e-3
    assert Forecast(Load(8, ROW_BYTES), tokens_at(0.7), target, learnt_drafter(1e-3)).best(4).num_groups == 1


def test_what_is_always_off_by_the_same_is_no_noise():
    """A few answers a second show that a link which began with 40 to 100 ms takes 2 ms now."""
    link, noise = LinearEstimate((1.0, 0.0), 0.1), random.Random(3)
    now = 0.0
    for _ in range(20):
        now += 5e-3
        link.observe((1.0, 8.0), 40e-3 + noise.expovariate(50.0), now)
    for _ in range(15):
        now += 0.2
        link.observe((1.0, 8.0), 2e-3, now)
    assert link.predict((1.0, 8.0)) == pytest.approx(2e-3, rel=0.1)


def test_a_trip_that_grows_longer_is_no_slower_byte():
    """A drafter that answered large messages is far for a while and near again, seen through small ones alone."""
    drafter = learnt_drafter(1e-3, byte_s=8e-9)
    for i in range(30):
        observe(drafter, 11e-3 + 8e-9 * ROW_BYTES + 1e-3, ROW_BYTES, 1, 4, 1, 1e-3, 10 + 0.5 * i)
    far, near = 11e-3, 1e-3
    assert drafter.transfer_s(100 * ROW_BYTES) == pytest.approx(far + 8e-9 * 100 * ROW_BYTES, rel=0.15)
    for i in range(30):
        observe(drafter, near + 8e-9 * ROW_BYTES + 1e-3, ROW_BYTES, 1, 4, 1, 1e-3, 30 + 0.5 * i)
    assert drafter.transfer_s(100 * ROW_BYTES) == pytest.approx(near + 8e-9 * 100 * ROW_BYTES, rel=0.3)
