"""When drafts are given up, and taken up again."""

from __future__ import annotations

import pytest
from drafting_scene import Clock

from verifier_service.pacing import Forecast, Governor, Made, Plan
from verifier_service.pacing.governor import (
    BEAR_SHARE,
    GIVE_UP_AFTER_STEPS,
    KEEP_ABOVE,
    LOST_SHARE,
    OWE_STEPS,
    REST_S,
    RESUME_AFTER,
    TRY_FOR_S,
)


class _Rates(Forecast):
    """Of one plan with drafts, that of 4 in one group."""

    def __init__(self, gain: float, *, is_alone: bool, step_s: float) -> None:
        self.without = self.without_any = 1.0
        self.is_alone = is_alone
        self.step_s = step_s
        self.lead_seen = 0.0
        self._gain = gain

    def rate(self, plan: Plan) -> float:
        return self._gain if plan.num_drafts else 1.0

    def best(self, num_drafts: int | None = None) -> Plan:  # noqa: ARG002
        return Plan(4)


def forecast_of(gain: float, *, is_alone: bool = True, step_s: float = 5e-3) -> Forecast:
    """Drafts are `gain` times as fast as none."""
    return _Rates(gain, is_alone=is_alone, step_s=step_s)


def test_drafts_are_given_up_when_they_have_lost_a_few_steps(clock):
    governor, without = Governor(4, is_adaptive=True), forecast_of(1.0).step_s
    for _ in range(4):
        began = clock.now
        while not governor.is_off:
            governor.decide(clock.now, forecast_of(0.81), forecast_of(2.0))
            clock.now += 0.01
        lost_s = (KEEP_ABOVE - 0.81) * (clock.now - began)
        assert lost_s == pytest.approx(GIVE_UP_AFTER_STEPS * without, abs=0.2 * 0.02 + 1e-6)
        while governor.is_off:
            governor.decide(clock.now, forecast_of(2.0), forecast_of(2.0))
            clock.now += 0.01


def test_drafts_that_gain_now_and_then_make_up_for_what_they_lost(clock):
    governor = Governor(4, is_adaptive=True)
    for i in range(400):
        governor.decide(clock.now, forecast_of(0.9 if i % 2 else 1.2), forecast_of(2.0))
        clock.now += 0.05
    assert not governor.is_off


def test_no_plan_alone_gives_up_drafts(clock):
    """As the first one after an hour without requests."""
    governor = Governor(4, is_adaptive=True)
    governor.decide(clock.now, forecast_of(1.2), forecast_of(2.0))
    governor.decide(clock.now + 3600.0, forecast_of(0.9), forecast_of(2.0))
    assert not governor.is_off
    governor.decide(clock.now + 7200.0, forecast_of(0.9), forecast_of(2.0))
    assert governor.is_off


def catch_up(governor: Governor, clock: Clock, lost_s: float, *, is_alone: bool = True) -> None:
    """Nothing is asked for until so much more is lost, a tenth of the time, than may always be."""
    for _ in range(round(lost_s / (5e-3 - BEAR_SHARE * 0.05))):
        clock.now += 0.05
        forecast = forecast_of(1.2, is_alone=is_alone)
        governor.decide(clock.now, forecast, made=Made(0.045, 0.05), asks_nothing=True)


LONG_S = OWE_STEPS * forecast_of(1.0).step_s


def test_catching_up_that_loses_nothing_may_last(clock):
    governor = Governor(4, is_adaptive=True)
    for _ in range(1000):
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(0.9), forecast_of(2.0), made=Made(0.04, 0.04), asks_nothing=True)
    assert not governor.is_off
    for _ in range(100):
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(0.9), forecast_of(2.0))
    assert governor.is_off


def test_drafts_are_given_up_when_catching_up_has_lost_much_and_rest_until_that_is_little(clock):
    governor = Governor(4, is_adaptive=True)
    catch_up(governor, clock, LONG_S - 5e-3)
    assert not governor.is_off
    catch_up(governor, clock, 9e-3)
    assert governor.is_off
    given_up = clock.now
    while governor.is_off:
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(1.2))
    assert clock.now - given_up == pytest.approx(LONG_S / LOST_SHARE, abs=0.1)


@pytest.mark.parametrize(("is_alone", "share"), [(True, LOST_SHARE), (False, 1.0)])
def test_a_drafter_rests_until_what_was_lost_is_little_unless_it_may_be_anothers_doing(clock, is_alone, share):
    governor, step_s = Governor(4, is_adaptive=True), 50e-3
    while not governor.is_off:
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(0.81, is_alone=is_alone, step_s=step_s), forecast_of(2.0))
    given_up = clock.now
    while governor.is_off:
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(1.2))
    rest_s = max(REST_S[0], GIVE_UP_AFTER_STEPS * step_s / share)
    assert clock.now - given_up == pytest.approx(rest_s, rel=0.08)


@pytest.mark.parametrize(("gain", "plans"), [(1.02, 4), (1.2, 20)])
def test_what_catching_up_has_lost_may_be_made_up_for(clock, gain, plans):
    governor = Governor(4, is_adaptive=True)
    for _ in range(3):
        catch_up(governor, clock, 0.6 * LONG_S)
        for _ in range(plans):
            clock.now += 0.05
            governor.decide(clock.now, forecast_of(gain), made=Made(gain * 0.05, 0.05))
    assert governor.is_off == (plans == 4)


def test_time_without_requests_makes_up_for_little(clock):
    """Drafts gain only where there are some."""
    governor = Governor(4, is_adaptive=True)
    catch_up(governor, clock, 0.9 * LONG_S)
    clock.now += 1.0
    governor.decide(clock.now, forecast_of(1.2))
    assert governor._owed_s > 0.2 * LONG_S


def test_catching_up_that_loses_nothing_ends_no_drafts_for_what_was_lost_before(clock):
    governor = Governor(4, is_adaptive=True)
    catch_up(governor, clock, 0.9 * LONG_S)
    clock.now += 0.05
    governor.decide(clock.now, forecast_of(1.2, step_s=1e-3), scale=1, made=Made(0.05, 0.05), asks_nothing=True)
    assert not governor.is_off


def test_what_was_lost_is_forgotten_when_drafts_are_given_up(clock):
    governor = Governor(4, is_adaptive=True)
    for _ in range(2):
        catch_up(governor, clock, 0.9 * LONG_S)
        assert not governor.is_off
        governor.decide(clock.now, forecast_of(0.5), forecast_of(0.5))
        while governor.is_off:
            clock.now += 0.05
            governor.decide(clock.now, forecast_of(1.2))


def test_what_catching_up_loses_counts_though_one_group_is_tried(clock):
    governor = Governor(4, is_adaptive=True)
    governor._trying_until = clock.now + 1000.0
    catch_up(governor, clock, LONG_S + 5e-3)
    assert governor.is_off


def test_what_is_lost_while_some_catch_up_may_be_another_drafters_doing(clock):
    governor = Governor(4, is_adaptive=True)
    catch_up(governor, clock, 2 * LONG_S, is_alone=False)
    assert not governor.is_off


def test_one_group_is_not_tried_while_sequences_catch_up(clock):
    governor = Governor(4, is_adaptive=True)
    for asks_nothing in (True, False):
        governor.plan = Plan(4, 2)
        clock.now += 100.0
        governor.decide(clock.now, forecast_of(1.2), asks_nothing=asks_nothing)
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(1.2), asks_nothing=asks_nothing)
        assert (governor._trying_until > clock.now) == (not asks_nothing)


@pytest.mark.parametrize("plans", [0, 20, 1000])
def test_what_steps_have_made_counts_more_than_what_was_expected(clock, plans):
    """And what they had gained before, as far as it is no more than what may be lost."""
    governor = Governor(4, is_adaptive=True)
    for _ in range(plans):
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(0.9), forecast_of(2.0), made=Made(0.041, 0.04))
    assert not governor.is_off
    most_s = GIVE_UP_AFTER_STEPS * forecast_of(1.0).step_s
    gained_s = min(plans * (0.041 - KEEP_ABOVE * 0.04), most_s)
    lost_s = 0.0
    while not governor.is_off:
        assert lost_s < most_s + gained_s
        clock.now += 0.05
        governor.decide(clock.now, forecast_of(1.2), made=Made(0.036, 0.04))
        lost_s += KEEP_ABOVE * 0.04 - 0.036
    assert lost_s == pytest.approx(most_s + gained_s, abs=KEEP_ABOVE * 0.04 - 0.036)


@pytest.mark.parametrize(("gain", "made"), [(0.8, 1.2), (1.2, 0.8)])
def test_one_of_several_drafters_is_given_up_when_it_would_lose_or_all_together_do(clock, gain, made):
    governor = Governor(4, is_adaptive=True)
    for _ in range(10):
        clock.now += 0.05
        forecast = forecast_of(gain, is_alone=False)
        governor.decide(clock.now, forecast, forecast_of(2.0), made=Made(0.05 * made, 0.05))
    assert governor.is_off


def test_what_a_trial_of_one_group_loses_is_no_reason_to_give_up_drafts(clock):
    governor = Governor(4, is_adaptive=True)
    governor._trying_until = clock.now + TRY_FOR_S
    for _ in range(8):  # the first one after it still tells of it
        governor.decide(clock.now, forecast_of(1.2), made=Made(0.01, 0.1))
        clock.now += 0.04
    assert governor._lost_s == 0.0
    governor.decide(clock.now, forecast_of(1.2), made=Made(0.01, 0.1))
    assert governor._lost_s > 0.0


def test_one_group_is_tried_no_longer_when_no_plan_gains(clock):
    governor = Governor(4, is_adaptive=True)
    governor._trying_until = clock.now + TRY_FOR_S
    for _ in range(3):
        governor.decide(clock.now, forecast_of(0.5), forecast_of(2.0), made=Made(0.05, 0.1))
        clock.now += 0.02
    assert governor.is_off
    assert clock.now > governor._trying_until


def test_drafts_that_would_not_gain_if_all_were_accepted_are_given_up_at_once():
    governor = Governor(4, is_adaptive=True)
    governor.decide(1000.0, forecast_of(0.99), forecast_of(1.0))
    assert governor.is_off


def test_a_drafter_that_relapses_rests_longer_each_time(clock):
    """Its link is fine for a few and too narrow for all, which a message of a few rows does not tell."""
    governor = Governor(4, is_adaptive=True)
    slow, fast = forecast_of(0.5), forecast_of(2.0)
    rests = []
    for _ in range(4):
        governor.decide(clock.now, slow)
        assert governor.is_off
        given_up = clock.now
        while governor.is_off:
            clock.now += 0.05
            governor.decide(clock.now, fast)
        rests.append(clock.now - given_up)
        clock.now += 0.1
    assert rests == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.1)


def decide(governor: Governor, now: float, gain: float, scale: int = 0, times: int = RESUME_AFTER) -> bool:
    """Whether drafts are asked for after so many plans, all at one time."""
    for _ in range(times):
        governor.decide(now, forecast_of(gain), scale=scale)
    return not governor.is_off


def test_a_drafter_rests_at_the_scale_of_the_load_at_which_it_was_given_up(clock):
    governor = Governor(4, is_adaptive=True)
    assert not decide(governor, clock.now, 0.5, 6, 1)
    assert not decide(governor, clock.now, 2.0, 6)
    assert decide(governor, clock.now, 2.0, 1)
    assert not decide(governor, clock.now, 2.0, 6)
    clock.now += REST_S[0]
    assert decide(governor, clock.now, 2.0, 1)
    assert decide(governor, clock.now, 2.0, 6)
    assert not decide(governor, clock.now, 0.5, 6, 1)  # so soon that it rests twice as long
    clock.now += REST_S[0]
    assert not decide(governor, clock.now, 2.0, 6)
    clock.now += REST_S[0]
    assert decide(governor, clock.now, 2.0, 6)


def test_drafts_are_taken_up_again_where_they_gain_for_a_while_at_one_scale_of_the_load():
    governor = Governor(4, is_adaptive=True)
    assert not decide(governor, 1000.0, 0.5, 6, 1)
    for _ in range(3):
        assert not decide(governor, 2000.0, 2.0, 2, RESUME_AFTER - 1)
        assert not decide(governor, 2000.0, 2.0, 1, RESUME_AFTER - 1)
        assert not decide(governor, 2000.0, 1.0, 1, 1)
        assert not decide(governor, 2000.0, 2.0, 1, RESUME_AFTER - 1)
    assert decide(governor, 2000.0, 2.0, 1, 1)


def test_a_plan_stays_until_another_is_clearly_better():
    governor = Governor(4, is_adaptive=True)
    for gain, has_drafts in ((1.04, True), (1.005, False), (1.04, False), (1.2, True)):
        assert decide(governor, 1000.0 + 10 * gain, gain) is has_drafts, gain
