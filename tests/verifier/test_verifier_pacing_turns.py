"""Sequences that take turns: what that costs, and when they are tried together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learnt_costs import MEASURED, ROW_BYTES, hidden_target, learnt_drafter, tokens_at

from verifier_service import step_gate
from verifier_service.pacing import Forecast, Governor, Hindsight, Load, Plan, Profile
from verifier_service.pacing.costs import TURN_FADES_S, TURN_SHARE
from verifier_service.step_gate import StepGate


class Turns:
    """The sequences of one drafter, whose plan a governor makes by what steps have cost, and a device that computes
    them: `trip_s` away, with a host that takes `lead_s` before a step of all of them."""

    def __init__(self, trip_s: float, lead_s: float, *, is_adaptive: bool = False) -> None:
        self._load, self._drafter = Load(64, ROW_BYTES), learnt_drafter(trip_s, byte_s=1e-12, draft_s=0.325e-3)
        self._latency_s, self._lead_s = trip_s + 4 * 0.325e-3, lead_s
        self._governor, self._hindsight = Governor(4, is_adaptive=is_adaptive), Hindsight()
        session: Any = SimpleNamespace(pace=self)
        stream: Any = None
        self.gate = StepGate({stream: session}, {}, Profile(MEASURED))
        self.now = 1000.0
        self.changes = 0

    @property
    def plan(self) -> Plan:
        return self._governor.plan

    def run(self, seconds: float, *, scale: float = 1.0, turn_s: float = 0.1e-3, idle_every: int = 0) -> float:
        """Lets time pass in which a pass takes so many times what was measured, and `turn_s` more beside another one,
        and a trial of one group come to its end; tokens per second. Each `idle_every`-th step of a group finds nothing
        running."""
        begin, end, tokens, planned, steps = self.now, self.now + seconds, 0.0, 0.0, 0
        while self.now < max(end, self._governor._trying_until + 0.1):
            groups = self.plan.num_groups
            rows = 320 // groups
            step_s = Profile(MEASURED).size(rows) * scale + (turn_s if groups > 1 else 0.0)
            waits = max(0.0, self._latency_s + self._lead_s - (groups - 1) * step_s)
            for _ in range(groups):
                self.now += step_s + waits / groups
                steps += 1
                is_idle = groups == 1 or (idle_every > 0 and steps % idle_every == 0)
                host_s = self._lead_s / groups if is_idle else 0.0
                self.gate.count_step(
                    rows,
                    has_prompts=False,
                    step_s=step_s,
                    host_s=host_s,
                    verified={("drafter", 4): 64 // groups},
                    landed=self.now,
                    is_beside=not is_idle,
                )
            tokens += 64 * tokens_at(0.75)[4]
            if self.now > planned + 0.05:
                planned = self.now
                shares, known = self._hindsight.shares, tokens_at(0.75)
                forecast = Forecast(self._load, known, self.gate.target_cost, self._drafter, shares=shares)
                rate, expected = forecast.rate(self.plan) / shares[self.plan.turns], {"drafter": known}
                self._hindsight.take(self.now, self.plan, self._load, rate, self.gate.output(expected), expected)
                self._governor.decide(self.now, forecast)
                self.changes += self.plan.num_groups != groups
        return tokens / (self.now - begin)


@pytest.fixture
def turns(monkeypatch):
    """Makes one; the gate goes by its clock."""

    def make(*costs: float, **options: bool) -> Turns:
        made = Turns(*costs, **options)
        monkeypatch.setattr(step_gate, "time", SimpleNamespace(monotonic=lambda: made.now))
        return made

    return make


def test_sequences_do_not_go_on_to_take_turns_where_a_step_is_longer_beside_the_drafter(turns):
    """As on one GPU that both compute on. What a step takes without others is still what it was."""
    world = turns(0.2e-3, 2.7e-3)
    world.run(2.0)
    assert world.plan.num_groups == 2
    world.run(1.0, turn_s=2e-3)
    assert world.plan.num_groups == 1
    assert world.gate.target_cost.seconds(320) == pytest.approx(MEASURED[320], rel=0.01)
    together = 64 * tokens_at(0.75)[4] / (MEASURED[320] + 0.2e-3 + 1.3e-3 + 2.7e-3)
    assert world.run(60.0, turn_s=2e-3) > 0.99 * together  # now and then they take turns to see whether it still is so


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize(("trip_s", "scale", "spell_s"), [(4.2e-3, 1.5, 5.0), (3e-3, 1.1, 5.0), (2e-3, 1.1, 0.3)])
def test_sequences_take_turns_again_after_a_spell_in_which_the_device_was_slower(
    turns, trip_s, scale, spell_s, is_adaptive
):
    world = turns(trip_s, 1e-3, is_adaptive=is_adaptive)
    world.run(5.0)
    assert world.plan.num_groups == 2
    before = world.run(5.0)
    world.run(spell_s, scale=scale)
    world.run(30.0)
    assert world.plan.num_groups == 2
    assert world.run(30.0) > 0.98 * before


def test_the_plan_does_not_change_to_and_fro_where_some_steps_of_a_group_find_nothing_running(turns):
    world = turns(0.2e-3, 3.3e-3)
    world.run(2.0, idle_every=10)
    world.changes = 0
    world.run(60.0, idle_every=10)
    assert world.plan.num_groups == 2
    assert world.changes <= 16  # trials of one group, less and less often


def test_what_sequences_that_take_turns_cost_each_other_is_assumed_before_it_is_seen_and_again_long_after():
    target = hidden_target(1e-3)
    assumed = target.turn_s
    assert assumed == TURN_SHARE * target.fixed > 0
    for i in range(100):
        target.observe_turn(160, MEASURED[160], 0.0, 1.0 + 0.01 * i)
    assert target.turn_s < 0.05 * assumed
    target.observe_host(1e-3, 2.0 + TURN_FADES_S, is_beside=False)
    assert target.turn_s == pytest.approx(assumed / 2, rel=0.05)
    target.observe_host(1e-3, 2.0 + 20 * TURN_FADES_S, is_beside=False)
    assert target.turn_s == pytest.approx(assumed, rel=0.01)


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("lead_s", [0.5e-3, 3.3e-3])
def test_sequences_that_take_turns_are_tried_together_and_stay_so_where_that_is_faster(lead_s, is_adaptive):
    """The host took 3 ms when they parted, and takes `lead_s` now, which one group alone shows."""
    target, governor = hidden_target(3e-3), Governor(4, is_adaptive=is_adaptive)
    load, drafter = Load(64, ROW_BYTES), learnt_drafter(0.2e-3, byte_s=1e-12, draft_s=0.325e-3)
    now, groups = 1.0, []
    while now < 9.0:
        now += 0.05
        governor.decide(now, Forecast(load, tokens_at(0.75), target, drafter))
        groups.append(governor.plan.num_groups)
        for i in range(4 if groups[-1] == 1 else 0):
            target.observe_host(lead_s, now + 0.012 * i, is_beside=False)
    assert groups[0] == 2
    if lead_s < 3e-3:
        assert set(groups[groups.index(1) :]) == {1}
    else:
        starts = [i for i in range(1, len(groups)) if groups[i] < groups[i - 1]]
        assert len(starts) == 4
        assert np.diff(starts).tolist() == sorted(np.diff(starts))
        assert groups.count(1) < 0.15 * len(groups)
