"""Which plan is thought to be the fastest."""

from __future__ import annotations

import random

import pytest
from learnt_costs import FIXED_S, MEASURED, ROW_BYTES, ROW_S, hidden_target, learnt_drafter, learnt_target, tokens_at

from verifier_service.pacing import Forecast, Load, Plan, Profile, TargetCost


@pytest.mark.parametrize(
    ("sequences", "lead_s", "turn_s", "groups"),
    [(64, 2.7e-3, 0.1e-3, 2), (64, 0.5e-3, 0.1e-3, 1), (32, 2.7e-3, 0.1e-3, 1), (64, 2.7e-3, 2e-3, 1)],
)
def test_sequences_part_where_the_host_and_the_drafts_of_one_group_hide_behind_the_step_of_the_other(
    sequences, lead_s, turn_s, groups
):
    """Two passes of 160 rows take 12.6 ms, one of 320 rows 9.6 ms and 1.5 ms of drafting."""
    load = Load(sequences, ROW_BYTES)
    drafter = learnt_drafter(0.2e-3, byte_s=1e-12, draft_s=0.325e-3)
    own = Forecast(load, tokens_at(0.75), hidden_target(lead_s, turn_s), drafter)
    assert own.best(4).num_groups == groups


def test_the_hosts_time_before_the_steps_of_one_request_parts_no_others():
    """Its steps have 5 rows, and 3 before its end. Sequences that took turns would never show their own."""
    noise = random.Random(0)
    target = TargetCost(Profile(MEASURED))
    for i in range(60):
        target.observe(5, 0, MEASURED[5], 0.006 * i)
        host_s = 0.3e-3 if i % 30 == 29 else 0.45e-3
        target.observe_host(host_s * noise.uniform(0.8, 1.2), 0.006 * i, is_beside=False)
    load, drafter = Load(32, ROW_BYTES), learnt_drafter(0.2e-3, byte_s=1e-12, draft_s=0.325e-3)
    assert Forecast(load, tokens_at(0.75), target, drafter).best(4).num_groups == 1
    for i in range(20):
        target.observe_host(0.7e-3 * noise.uniform(0.9, 1.1), 0.4 + 0.008 * i, is_beside=False)
    assert target.lead_s == pytest.approx(0.7e-3, rel=0.1)


def test_the_rate_counts_the_hosts_time_where_it_is_not_hidden():
    drafter = learnt_drafter(0.2e-3, byte_s=1e-12, draft_s=0.325e-3)
    own = Forecast(Load(64, ROW_BYTES), tokens_at(0.75), hidden_target(2.7e-3, 0.1e-3), drafter)
    assert own.rate(Plan(4)) == pytest.approx(64 * 3.05 / (9.6e-3 + 2.7e-3 + 1.5e-3), rel=0.02)
    assert own.rate(Plan(4, 2)) == pytest.approx(64 * 3.05 / (2 * 6.4e-3), rel=0.02)
    assert own.without == pytest.approx(64 / 5.7e-3, rel=0.02)


# With c = 0.75, k = 4 emits 3.05 tokens.
def forecast(trip_s: float, sequences: int = 1, rate: float = 0.75, byte_s: float = 1e-9, **others: float) -> Forecast:
    load = Load(sequences, ROW_BYTES, **others)
    return Forecast(load, tokens_at(rate), learnt_target(), learnt_drafter(trip_s, byte_s))


def test_the_rate_of_one_group_is_its_tokens_over_a_step_and_the_wait():
    own = forecast(1e-3)
    seconds = FIXED_S + 5 * ROW_S + 1e-3 + 1e-9 * ROW_BYTES * 3.05 + 4 * 0.35e-3
    assert own.rate(Plan(4)) == pytest.approx(3.05 / seconds, rel=0.02)
    assert own.rate(Plan(0)) == pytest.approx(1 / (FIXED_S + ROW_S), rel=0.02)


def test_two_groups_hide_the_wait_behind_each_others_steps():
    own = forecast(2e-3, sequences=32)
    step = FIXED_S + 80 * ROW_S
    assert own.rate(Plan(4, 2)) == pytest.approx(32 * 3.05 / (2 * step), rel=0.03)


def test_sequences_that_take_turns_have_those_of_another_drafter_in_every_second_step():
    """If those are one group. Others that draft nothing are in each."""
    joint = forecast(1e-3, sequences=16, other_rows=80.0, other_tokens=48.0, joint_rows=80.0, joint_tokens=48.0)
    among = forecast(1e-3, sequences=16, other_rows=80.0, other_tokens=48.0)
    step_s = {rows: FIXED_S + ROW_S * rows for rows in (80, 120)}
    assert joint.rate(Plan(4, 2)) == pytest.approx((16 * 3.05 + 48) / (2 * step_s[80]), rel=0.02)
    assert among.rate(Plan(4, 2)) == pytest.approx((16 * 3.05 + 2 * 48) / (2 * step_s[120]), rel=0.02)
    assert joint.rate(Plan(4)) == among.rate(Plan(4))
    assert joint.best(4).num_groups == 1


@pytest.mark.parametrize(("trip_s", "groups"), [(0.2e-3, 1), (2e-3, 1), (6e-3, 2), (12e-3, 3)])
def test_sequences_part_into_groups_where_the_wait_is_longer_than_a_steps_fixed_time(trip_s, groups):
    assert forecast(trip_s, sequences=32).best(4).num_groups == groups


def test_a_single_sequence_makes_one_group():
    assert forecast(9e-3, sequences=1).best() == Plan(forecast(9e-3).best().num_drafts, 1)


def test_a_link_that_is_too_narrow_bounds_every_plan():
    """64 sequences of 3 rows of 8 KiB at 1 Gbit/s take 12.6 ms of the link a round, however they part."""
    own = forecast(0.2e-3, sequences=64, byte_s=8e-9)
    wire = 8e-9 * ROW_BYTES * 64 * 3.05
    for groups in (1, 2, 3, 4):
        assert own.rate(Plan(4, groups)) <= 64 * 3.05 / wire


def test_fewer_drafts_pay_where_they_are_rarely_accepted():
    good, poor = forecast(1e-3, rate=0.9).best(), forecast(1e-3, rate=0.35).best()
    assert good.num_drafts == 4
    assert poor.num_drafts < 3


def test_drafts_that_are_further_away_than_they_gain_are_slower_than_none():
    near, far = forecast(1e-3), forecast(30e-3)
    assert near.rate(near.best()) > near.without
    assert far.rate(far.best()) < far.without
