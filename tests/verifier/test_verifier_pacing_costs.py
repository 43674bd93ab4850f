"""What is learnt of the target's steps, of a drafter's computing and of its drafts' acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learnt_costs import FIXED_S, MEASURED, ROW_BYTES, ROW_S, hidden_target, learnt_target, observe, tokens_at

from verifier_service import step_gate
from verifier_service.pacing import Acceptance, DrafterCost, Forecast, Load, Plan, Profile, TargetCost
from verifier_service.pacing.costs import HALF_LIFE_TRIALS, HOST_STEPS, LEAD_FADES_S, TURN_SHARE
from verifier_service.step_gate import StepGate


def test_the_target_cost_tells_its_fixed_part_from_rows():
    target = learnt_target()
    assert target.fixed == pytest.approx(FIXED_S, rel=0.01)
    assert target.seconds(160) == pytest.approx(FIXED_S + 160 * ROW_S, rel=0.01)


def test_a_measured_pass_shows_what_no_straight_line_does():
    """After steps of one size, a little longer than when they were measured, those of others are known."""
    target = TargetCost(Profile(MEASURED))
    for i in range(100):
        target.observe(320, 0, 1.02 * MEASURED[320], 0.01 * i)
    for rows, seconds in MEASURED.items():
        assert target.seconds(rows) == pytest.approx(1.02 * seconds, rel=0.01)
    between = target.seconds(np.array([[100.0, 112.0], [1.0, 480.0]]))
    assert between[0, 1] == pytest.approx(1.02 * (5.6e-3 + 6.3e-3) / 2, rel=0.01)
    assert between[1, 0] == pytest.approx(target.fixed)
    assert between[1, 1] == pytest.approx(1.02 * (9.6e-3 + 3.3e-3), rel=0.01)


def test_no_step_is_tried_out_whose_pass_was_measured():
    guessed, measured = TargetCost(), TargetCost(Profile(MEASURED))
    for i in range(100):
        for target in (guessed, measured):
            target.observe(320, 0, MEASURED[320], 0.01 * i)
    assert guessed.wants_step_of(64, 10.0)
    assert not measured.wants_step_of(64, 10.0)


def test_more_rows_take_no_less_whatever_was_measured():
    profile = Profile({1: 5e-3, 5: 4.9e-3, 8: 6e-3})
    assert profile.size(5) == profile.size(1) == 5e-3
    assert Profile({5: 4e-3}).size(7) == 7  # one size shows nothing


def answers(
    drafter: DrafterCost, compute_s: float, now: float, count: int, *, is_beside: bool, sequences: int = 32
) -> float:
    """Has it take so many, 10 ms apart; when the last one came."""
    for _ in range(count):
        now += 0.01
        observe(drafter, 1e-3 + compute_s, ROW_BYTES, 3 * sequences, 4, sequences, compute_s, now, is_beside=is_beside)
    return now


def test_what_a_drafter_takes_longer_beside_steps_is_a_cost_of_its_own():
    drafter = DrafterCost()
    now = 0.0
    for _ in range(10):
        now = answers(drafter, 2e-3, now, 5, is_beside=False)
        now = answers(drafter, 5e-3, now, 5, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.05)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(5e-3, rel=0.05)


def test_answers_beside_steps_say_nothing_of_those_alone():
    """A drafter that takes four times as long beside prompts, and from then on is always beside steps, in two groups
    of half as many sequences."""
    drafter = DrafterCost()
    now = answers(drafter, 2e-3, 0.0, 50, is_beside=False)
    now = answers(drafter, 8e-3, now, 20, is_beside=True)
    now = answers(drafter, 4e-3, now, 300, is_beside=True, sequences=16)
    assert drafter.compute_s(48, 4, 16, is_beside=True) == pytest.approx(4e-3, rel=0.05)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.05)


def test_a_drafter_that_is_sooner_beside_steps_than_it_was_alone_is_so_alone_too():
    drafter = DrafterCost()
    now = answers(drafter, 8e-3, 0.0, 50, is_beside=False)
    answers(drafter, 2e-3, now, 50, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(2e-3, rel=0.05)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.05)


@pytest.mark.parametrize("cold_s", [0.1, 1.5])
def test_a_drafter_that_begins_cold_is_known_for_what_it_is_after_a_few_answers(cold_s):
    drafter = DrafterCost()
    now = answers(drafter, cold_s, 0.0, 2, is_beside=False)
    now = answers(drafter, 2e-3, now, 4, is_beside=False)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.1)
    now = answers(drafter, 2e-3, now, 8, is_beside=False)
    answers(drafter, 1.2e-3, now, 50, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(1.2e-3, rel=0.05)


def test_histories_are_a_cost_of_their_own():
    """No graph is there for them, so that a few rows take longer than the drafts of many sequences."""
    drafter, now = DrafterCost(), 0.0
    for rows in (8, 60, 512, 64) * 10:
        now = answers(drafter, 1.5e-3, now, 1, is_beside=True)
        drafter.observe_histories(4e-3 + 10e-6 * rows, rows, now)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(1.5e-3, rel=0.05)
    assert drafter.histories_s(60) == pytest.approx(4.6e-3, rel=0.1)
    assert drafter.per_history_row == pytest.approx(10e-6, rel=0.1)


def test_prompts_say_nothing_of_what_drafts_take_alone():
    drafter, now = DrafterCost(), 0.0
    for _ in range(50):
        now += 0.01
        drafter.observe_link(0.5e-3, ROW_BYTES, now)
        drafter.observe_histories(0.5e-3, 256, now)
    assert not drafter.is_known  # of drafts
    now = answers(drafter, 10e-3, now, 1, is_beside=True)
    answers(drafter, 3e-3, now, 24, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(3e-3, rel=0.1)


def test_what_is_known_of_a_drafter_whose_answers_always_come_beside_steps_is_what_it_takes():
    """As where several drafters alternate."""
    drafter = DrafterCost()
    answers(drafter, 3e-3, 0.0, 50, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(3e-3, rel=0.05)


def test_answers_beside_prompts_are_not_taken_for_those_alone():
    """At first there are no others: some have hardly anything beside them, most have much."""
    drafter, noise = DrafterCost(), random.Random(6)
    now = 0.0
    for i in range(60):
        compute_s = 2e-3 if i % 6 == 5 else 2e-3 + noise.uniform(3e-3, 20e-3)
        now = answers(drafter, compute_s, now, 1, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.1)
    now = answers(drafter, 8e-3, now, 50, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(8e-3, rel=0.1)


def test_a_drafter_that_became_faster_is_known_to_be_though_some_answers_beside_steps_take_long():
    drafter, noise = DrafterCost(), random.Random(2)
    now = answers(drafter, 20e-3, 0.0, 50, is_beside=False)
    for _ in range(12):
        now = answers(drafter, 25e-3 if noise.random() < 0.3 else 2e-3, now, 1, is_beside=True)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.2)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_drafter_takes_beside_steps_is_followed_though_its_first_answers_were_hardly_longer(seed):
    """None comes alone, which would take 2 ms; four in five of those beside steps take 3 to 20 ms more."""
    drafter, noise = DrafterCost(), random.Random(seed)
    now, said = 0.0, []
    for i in range(1500):
        alone_s = 2e-3 * noise.gauss(1.0, 0.03)
        now = answers(drafter, alone_s + noise.uniform(3e-3, 20e-3) * (noise.random() < 0.8), now, 1, is_beside=True)
        if i >= 700:
            said.append(drafter.compute_s(96, 4, 32, is_beside=True))
    assert sum(said) / len(said) == pytest.approx(2e-3 + 0.8 * 11.5e-3, rel=0.1)


def test_noise_of_answers_beside_steps_does_not_shorten_those_alone():
    drafter, noise = DrafterCost(), random.Random(4)
    now = 0.0
    for i in range(3000):
        compute_s = 2e-3 * noise.gauss(1.0, 0.1)
        now = answers(drafter, compute_s, now, 1, is_beside=i >= 100)
    assert drafter.compute_s(96, 4, 32, is_beside=False) == pytest.approx(2e-3, rel=0.05)
    assert drafter.compute_s(96, 4, 32, is_beside=True) == pytest.approx(2e-3, rel=0.1)


def test_a_drafter_that_is_slow_beside_steps_is_not_left_to_turns():
    """Where sequences take turns, all its answers are."""
    target, drafter = learnt_target(), DrafterCost()
    now = answers(drafter, 1.5e-3, 0.0, 50, is_beside=False)
    answers(drafter, 5e-3, now, 100, is_beside=True, sequences=16)
    tokens = tokens_at(0.75)
    assert Forecast(Load(32, 1), tokens, target, drafter).best(4) == Plan(4, 1)
    slow = DrafterCost()  # whose time does not depend on what else runs
    answers(slow, 5e-3, 0.0, 100, is_beside=False, sequences=16)
    assert Forecast(Load(32, 1), tokens, target, slow).best(4).num_groups > 1
    among_others = Forecast(Load(32, 1, other_rows=32.0, other_tokens=32.0), tokens, target, drafter)
    round_s = FIXED_S + ROW_S * (32 * 5 + 32) + drafter.link[0] + drafter.compute_s(96, 4, 32, is_beside=True)
    assert among_others.rate(Plan(4, 1)) == pytest.approx((32 * tokens[4] + 32) / round_s, rel=0.01)


def test_the_gate_knows_whether_a_step_ran_while_an_answer_was_awaited(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.value, value=0.0)
    monkeypatch.setattr(step_gate, "time", now)
    gate = StepGate({}, {}, Profile())

    def at(time: float, note: Callable[[], None]) -> None:
        now.value = time
        note()

    assert not gate.ran_between(0.0, 100.0)
    at(1.0, gate.note_launch)
    assert gate.ran_between(0.5, 1.5)
    assert not gate.ran_between(0.5, 0.9)
    at(2.0, gate.note_launch)
    at(3.0, gate.note_landing)
    assert gate.ran_between(3.0, 4.0)
    at(5.0, gate.note_landing)
    assert gate.ran_between(4.0, 6.0)
    assert not gate.ran_between(5.0, 6.0)


@pytest.mark.parametrize(
    ("is_beside", "step_s", "lead_s", "beside_s"),
    [(None, 6e-3, 0.0, 0.0), (False, 4e-3, 2e-3, 0.0), (True, 4e-3, 0.0, 2e-3)],
)
def test_the_hosts_time_is_the_steps_where_nothing_hides_it(is_beside, step_s, lead_s, beside_s):
    gate = StepGate({}, {}, Profile())
    for _ in range(20):
        gate.count_step(500, has_prompts=True, step_s=1.0, host_s=1.0, is_beside=is_beside)
        gate.count_step(5, has_prompts=False, step_s=4e-3, host_s=2e-3, is_beside=is_beside)
        gate.count_step(5, has_prompts=False, step_s=4e-3, host_s=2e-3, is_beside=is_beside)
    cost = gate.target_cost
    found = (cost.seconds(5), cost.lead_s, cost.beside_s)
    assert found == pytest.approx((step_s, lead_s, beside_s), rel=0.01)
    assert cost.turn_s == 0.0


def test_steps_of_several_drafters_that_alternate_show_what_a_step_costs():
    """Each has one group, and nearly all steps are launched beside the other's."""
    one: Any = SimpleNamespace(pace=SimpleNamespace(plan=Plan(4)))
    streams: list[Any] = [1, 2]
    gate = StepGate(dict.fromkeys(streams, one), {}, Profile(MEASURED))
    for i in range(300):
        step_s = MEASURED[160] if i < 8 else 2 * MEASURED[160]
        verified = {("drafter", 4): 32}
        gate.count_step(160, has_prompts=False, step_s=step_s, host_s=1e-4, is_beside=i > 0, verified=verified)
    assert gate.target_cost.seconds(160) == pytest.approx(2 * MEASURED[160], rel=0.05)
    assert gate.target_cost.turn_s == TURN_SHARE * gate.target_cost.fixed  # as before anything was seen


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_host_that_stalls_for_a_few_steps_takes_no_longer_by_that(is_beside):
    target = TargetCost()

    def host_s(seconds: float, steps: int) -> float:
        for _ in range(steps):
            target.observe_host(seconds, 0.0, is_beside=is_beside)
        return target.beside_s if is_beside else target.lead_s

    assert host_s(1e-3, HOST_STEPS) == 1e-3
    assert host_s(40e-3, HOST_STEPS // 2) == 1e-3
    assert host_s(5e-3, HOST_STEPS) == 5e-3


def test_what_the_host_took_before_steps_with_drafts_fades_while_there_are_none():
    target = hidden_target(8e-3)
    seen, lead_s = target.lead_seen, target.lead_s
    assert lead_s == pytest.approx(8e-3, rel=0.05)
    target.observe_turn(160, MEASURED[160], 0.0, seen + LEAD_FADES_S)  # sequences take turns
    target.observe(160, 0, MEASURED[160], seen + LEAD_FADES_S)
    assert target.lead_s == lead_s
    target.observe(160, 0, MEASURED[160], seen + 3 * LEAD_FADES_S)
    assert target.lead_s == pytest.approx(lead_s / 4)


@pytest.mark.parametrize(
    ("num_groups", "is_beside", "verified", "cost"),
    [
        (1, False, {("drafter", 4): 32}, "lead_s"),
        (1, True, {("", 0): 160}, "beside_s"),
        (2, True, {("drafter", 4): 32}, "turn_s"),
    ],
)
def test_what_the_host_does_behind_steps_with_prompts_parts_no_sequences(num_groups, is_beside, verified, cost):
    """However many of them there are, as where requests end and others come."""
    session: Any = SimpleNamespace(pace=SimpleNamespace(plan=Plan(4, num_groups)))
    stream: Any = None
    gate = StepGate({stream: session}, {}, Profile(MEASURED))

    def count(host_s: float) -> None:
        step_s = MEASURED[160]
        gate.count_step(
            160, has_prompts=False, step_s=step_s, host_s=host_s, verified=verified, is_beside=is_beside
        )

    for _ in range(20):
        gate.count_step(160, has_prompts=False, step_s=MEASURED[160], host_s=1e-3, is_beside=False)
    for _ in range(20):
        count(1e-3)
    for _ in range(20):
        gate.count_step(500, has_prompts=True, step_s=15e-3, host_s=5e-3, is_beside=is_beside)
        count(12e-3)
    assert getattr(gate.target_cost, cost) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("cause", ["histories", "a part"])
def test_what_the_host_does_for_histories_or_a_part_of_the_sequences_is_not_what_it_takes_before_drafts(cause):
    session: Any = SimpleNamespace(pace=SimpleNamespace(plan=Plan(4)))
    stream: Any = None
    bindings: Any = dict.fromkeys(range(32), SimpleNamespace(session=session))
    gate = StepGate({stream: session}, bindings, Profile(MEASURED))

    def count(sequences: int, host_s: float) -> None:
        verified = {("drafter", 4): sequences}
        step_s = MEASURED[160]
        gate.count_step(160, has_prompts=False, step_s=step_s, host_s=host_s, verified=verified, is_beside=False)

    for _ in range(20):
        gate.count_sent(96, has_histories=False)
        count(32, 1e-3)
    for _ in range(20):
        gate.count_sent(96, has_histories=cause == "histories")
        count(32 if cause == "histories" else 5, 8e-3)
    if cause == "histories":
        count(32, 8e-3)  # it was launched before the last one was counted
    assert gate.target_cost.lead_s == pytest.approx(1e-3, rel=0.01)
    for _ in range(20):
        count(32, 8e-3)
    assert gate.target_cost.lead_s == pytest.approx(8e-3, rel=0.1)


def test_a_cost_is_the_same_whether_it_is_settled_after_each_observation_or_read_at_the_end():
    settled, late = DrafterCost(), DrafterCost()
    for i in range(50):
        for one in (settled, late):
            observe(one, 2e-3 + 1e-4 * (i % 3), ROW_BYTES * (1 + i % 5), 1 + i % 5, 4, 1, 1e-3, 0.01 * i)
        settled.settle()
    assert (settled.link, settled.compute, settled.jitter) == (late.link, late.compute, late.jitter)


def test_nothing_is_known_before_enough_has_been_seen():
    target, drafter = TargetCost(), DrafterCost()
    assert not target.is_known
    assert not drafter.is_known
    for i in range(8):
        target.observe(5, 0, 5e-3, 0.01 * i)
        observe(drafter, 2e-3, 100, 5, 4, 1, 1e-3, 0.01 * i)
    assert target.is_known
    assert drafter.is_known


def test_acceptance_is_learnt_at_each_position_given_those_before():
    draw = random.Random(1)
    acceptance = Acceptance(3)
    for _ in range(4000):
        accepted = 0
        while accepted < 3 and draw.random() < (0.8, 0.5, 0.9)[accepted]:
            accepted += 1
        acceptance.count(3, accepted)
    assert acceptance.expected_tokens() == pytest.approx([1, 1.8, 2.2, 2.56], abs=0.15)


def test_acceptance_forgets():
    acceptance = Acceptance(2)
    for _ in range(2000):
        acceptance.count(2, 2)
    assert acceptance.expected_tokens()[2] > 2.9
    for _ in range(600):
        acceptance.count(2, 0)
    assert acceptance.expected_tokens()[2] < 1.1


def test_what_was_known_counts_for_no_more_than_trials_do():
    """Of a drafter that was asked for much and is tried now and then."""
    acceptance = Acceptance(2)
    acceptance.forget_over(32)
    for _ in range(4000):
        acceptance.count(2, 0)
    known = acceptance.expected_tokens()
    acceptance.forget_over(0)
    assert acceptance.expected_tokens()[1] == pytest.approx(known[1], abs=0.25)
    for _ in range(2 * HALF_LIFE_TRIALS):
        acceptance.count(2, 2)
    assert acceptance.expected_tokens()[1] > 1.65


def test_a_position_that_was_never_drafted_takes_after_the_one_before_it():
    acceptance = Acceptance(3)
    for i in range(1000):
        acceptance.count(1, i % 2)
    rate = acceptance.expected_tokens()[1] - 1
    assert rate == pytest.approx(0.5, abs=0.02)
    assert acceptance.expected_tokens()[3] == pytest.approx(1 + rate + rate**2 + rate**3, abs=1e-6)
