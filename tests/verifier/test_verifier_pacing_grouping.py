"""When a step waits for drafts that are on their way."""

from __future__ import annotations

import math

import pytest
from learnt_costs import FIXED_S, learnt_target

from verifier_service.pacing import Expected, Group, hold_until

TOKENS_5 = 3.0  # of five rows


def ready(drafted: int, undrafted: int = 0) -> Group:
    return Group(5 * drafted + undrafted, TOKENS_5 * drafted + undrafted)


def on_the_way(arrival: float, sequences: int = 8, redraft_s: float = math.inf, latest: float = math.inf) -> Expected:
    return Expected(ready(sequences), arrival, latest, redraft_s)


@pytest.mark.parametrize(("delay_s", "held"), [(0.5e-3, True), (4.5e-3, True), (5.2e-3, False), (20e-3, False)])
def test_a_group_waits_for_another_that_is_less_than_the_fixed_time_away(delay_s, held):
    until = hold_until(100.0, ready(8), ready(0), [on_the_way(100.0 + delay_s)], learnt_target())
    assert (until is not None) == held
    if held:  # for as long again as it is overdue
        assert until == pytest.approx(100.0 + delay_s + FIXED_S, abs=0.1e-3)


def test_a_step_is_not_held_for_longer_than_its_drafts_are_waited_for():
    expected = [on_the_way(100.0 + 1e-3, latest=100.0 + 2e-3)]
    assert hold_until(100.0, ready(8), ready(0), expected, learnt_target()) == 100.0 + 2e-3
    assert hold_until(100.0 + 2e-3, ready(8), ready(0), expected, learnt_target()) is None


@pytest.mark.parametrize(
    ("sequences", "delay_s", "held"),
    [(1, 0.05e-3, True), (1, 1e-3, False), (4, 0.2e-3, True), (4, 3e-3, False), (31, 3e-3, True), (31, 4.5e-3, True)],
)
def test_a_few_that_would_join_the_next_step_are_waited_for_a_moment_only(sequences, delay_s, held):
    """All others would lose it, and they miss a step; the few wait for the many."""
    expected = [on_the_way(100.0 + delay_s, sequences, redraft_s=2e-3)]
    until = hold_until(100.0, ready(32 - sequences), ready(0), expected, learnt_target())
    assert (until is not None) == held


@pytest.mark.parametrize(("share", "held"), [(0.3, False), (0.7, False), (0.8, True), (1.2, True)])
def test_a_few_are_not_counted_on_to_join_a_next_step_for_which_others_take_about_a_steps_fixed_time(share, held):
    expected = [on_the_way(100.0 + 3e-3, 4, redraft_s=share * FIXED_S)]
    assert (hold_until(100.0, ready(28), ready(0), expected, learnt_target()) is not None) == held


def test_a_step_with_nothing_on_the_way_is_not_held():
    assert hold_until(100.0, ready(8), ready(0), [], learnt_target()) is None


def test_drafts_that_did_not_come_when_they_should_are_not_waited_for():
    assert hold_until(100.0, ready(8), ready(0), [on_the_way(99.0)], learnt_target()) is None
    assert hold_until(100.0, ready(8), ready(0), [on_the_way(100.0 - 1.1 * FIXED_S)], learnt_target()) is None


def test_drafts_that_are_overdue_are_expected_to_take_as_long_again():
    for overdue_s, held in ((0.1e-3, True), (2e-3, True), (4.5e-3, True), (6e-3, False)):
        until = hold_until(100.0, ready(8), ready(0), [on_the_way(100.0 - overdue_s)], learnt_target())
        assert (until is not None) == held
        if held:
            assert until == pytest.approx(100.0 - overdue_s + FIXED_S, abs=0.1e-3)


def test_many_sequences_without_drafts_do_not_wait_for_a_few_with_drafts():
    """They lose a step's time each, and the few ride in the step after."""
    many = Group(32, 32.0)
    assert hold_until(100.0, many, many, [on_the_way(102.0e0, 1)], learnt_target()) is None
    assert hold_until(100.0, many, many, [on_the_way(100.0 + 2.5e-3, 1)], learnt_target()) is None


def test_a_step_that_the_host_has_yet_to_launch_waits_for_drafts_that_come_meanwhile():
    """The joint one is launched while it waits."""
    plain, expected = Group(24, 24.0), [on_the_way(100.0 + 2e-3)]
    assert hold_until(100.0, plain, plain, expected, learnt_target()) is None
    assert hold_until(100.0, plain, plain, expected, learnt_target(), 1e-3) is not None


def test_a_sequence_without_drafts_joins_the_step_of_many_with_drafts():
    one = Group(1, 1.0)
    assert hold_until(100.0, one, one, [on_the_way(100.0 + 2e-3, 16)], learnt_target()) is not None


def test_a_prompt_joins_the_step_of_drafts_that_come_soon():
    prompt = Group(0, 0.0)
    assert hold_until(100.0, prompt, prompt, [on_the_way(100.0 + 2e-3)], learnt_target()) is not None
    assert hold_until(100.0, prompt, prompt, [on_the_way(100.0 + 9e-3)], learnt_target()) is None


def test_a_step_waits_for_the_later_of_two_groups_where_both_are_near():
    near, later = on_the_way(100.0 + 0.5e-3), on_the_way(100.0 + 1.0e-3)
    assert hold_until(100.0, ready(8), ready(0), [later, near], learnt_target()) > later.arrival
    assert hold_until(near.arrival, ready(16), ready(0), [later], learnt_target()) > later.arrival


def test_a_step_does_not_wait_for_the_later_group_when_it_is_far():
    near, later = on_the_way(100.0 + 0.5e-3), on_the_way(100.0 + 9e-3)
    of_near = hold_until(100.0, ready(8), ready(0), [near], learnt_target())
    assert hold_until(100.0, ready(8), ready(0), [later, near], learnt_target()) == of_near
