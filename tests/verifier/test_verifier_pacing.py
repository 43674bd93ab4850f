"""What is learnt of costs, which plan they make, and when a step waits for drafts that are on their way."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verifier_service import step_gate
from verifier_service.pacing import (
    Acceptance,
    DrafterCost,
    Expected,
    Forecast,
    Governor,
    Group,
    Hindsight,
    Load,
    Made,
    Output,
    Pace,
    Plan,
    Profile,
    TargetCost,
    hold_until,
)
from verifier_service.pacing.costs import HALF_LIFE_TRIALS, HOST_STEPS, LEAD_FADES_S, TURN_FADES_S, TURN_SHARE
from verifier_service.pacing.estimate import CHANGE_AFTER, LinearEstimate
from verifier_service.pacing.hindsight import HALF_LIFE_S, LEAST_WINDOWS, scale_of
from verifier_service.pacing.pace import FIRST_BACKLOG_BYTES, IDLE_BACKLOG_S, MOST_ROWS
from verifier_service.step_gate import StepGate

# The 8B shape on an H200: seconds of a step, of a row.
FIXED_S, ROW_S = 4.87e-3, 6.5e-6
ROW_BYTES = 8192


def learnt_target(fixed_s: float = FIXED_S, row_s: float = ROW_S) -> TargetCost:
    target = TargetCost()
    for i in range(300):
        rows = (5, 40, 160, 32)[i % 4]
        target.observe(rows, 0, fixed_s + row_s * rows, 0.01 * i)
    return target


def observe(
    drafter: DrafterCost,
    seconds: float,
    num_bytes: int,
    rows: int,
    drafts: int,
    sequences: int,
    compute_s: float,
    now: float,
    *,
    is_beside: bool = False,
) -> None:
    """Has it take an answer that came after so many seconds."""
    drafter.observe_link(seconds - compute_s, num_bytes, now)
    drafter.observe_compute(compute_s, rows, drafts, sequences, now, is_beside=is_beside)


def learnt_drafter(trip_s: float, byte_s: float = 1e-9, draft_s: float = 0.35e-3) -> DrafterCost:
    """A drafter that is `trip_s` away and takes `draft_s` for each draft position."""
    drafter = DrafterCost()
    for i in range(300):
        rows, drafts, sequences = ((3, 4, 1), (90, 4, 32), (24, 2, 8))[i % 3]
        num_bytes = ROW_BYTES * rows
        compute_s = draft_s * drafts
        seconds = trip_s + byte_s * num_bytes + compute_s
        observe(drafter, seconds, num_bytes, rows, drafts, sequences, compute_s, 0.01 * i)
    return drafter


def tokens_at(rate: float, k: int = 4) -> list[float]:
    """Expected tokens of 0 .. k drafts of that acceptance rate."""
    return [sum(rate**j for j in range(i + 1)) for i in range(k + 1)]


# Estimates.


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


def test_the_target_cost_tells_its_fixed_part_from_rows():
    target = learnt_target()
    assert target.fixed == pytest.approx(FIXED_S, rel=0.01)
    assert target.seconds(160) == pytest.approx(FIXED_S + 160 * ROW_S, rel=0.01)


# A pass of the 8B shape on an H200 by its rows, seconds: bound by memory, then by arithmetic.
MEASURED = {1: 4.55e-3, 5: 4.62e-3, 40: 5.05e-3, 64: 5.6e-3, 160: 6.3e-3, 320: 9.6e-3}


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


def hidden_target(lead_s: float, turn_s: float = 0.0) -> TargetCost:
    """One whose host takes `lead_s` before a step, where it shows; sequences that take turns cost each other `turn_s`.
    """
    target = TargetCost(Profile(MEASURED))
    for i in range(100):
        rows = (320, 160)[i % 2]
        target.observe(rows, 0, MEASURED[rows], 0.01 * i)
        target.observe_host(lead_s, 0.01 * i, is_beside=False)
        if turn_s:
            target.observe_turn(rows, MEASURED[rows] + turn_s / 2, turn_s / 2, 0.01 * i)
    return target


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
    round_s = FIXED_S + ROW_S * (32 * 5 + 32) + 1e-3 + drafter.compute_s(96, 4, 32, is_beside=True)
    assert among_others.rate(Plan(4, 1)) == pytest.approx((32 * tokens[4] + 32) / round_s, rel=0.01)


class Answers:
    """Of a drafter that answers messages in order, told to its pace."""

    def __init__(self) -> None:
        self.pace = Pace(4, None)

    def tell(self, sent: float, received: float, compute_s: float, rows: int = 3) -> None:
        """A message that wants 4 drafts of a sequence was sent and answered then."""
        message = self.pace.send(sent, ROW_BYTES, rows, 4, 1)
        self.pace.take_answer(message, received, compute_s, is_beside=False)

    @property
    def known(self) -> tuple[float, float]:
        """What it says of a message's way and of computing for it."""
        return self.pace.cost.transfer_s(ROW_BYTES), self.pace.cost.compute_s(3, 4, 1, is_beside=False)


def test_a_message_that_a_drafter_takes_together_with_a_longer_one_says_nothing_of_computing():
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
        answers.tell(0.1 * i + 50e-3, 0.1 * i + 71e-3, 20e-3, rows=512)
        answers.tell(0.1 * i + 50.1e-3, 0.1 * i + 71.1e-3, 20e-3)  # the drafter tells the time of both
    assert answers.known == pytest.approx((1e-3, 2e-3), rel=0.05)


def test_a_message_that_waits_for_the_drafter_says_nothing_of_its_way():
    """Each second one is sent when the drafter has just got another."""
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
        answers.tell(0.1 * i + 0.1e-3, 0.1 * i + 5.2e-3, 2e-3)
    assert answers.known == pytest.approx((1e-3, 2e-3), rel=0.05)
    assert answers.pace.cost.jitter < 0.1e-3


def test_what_stood_behind_other_bytes_tells_nothing_of_a_link_that_is_not_known():
    """One of 1 Gbit/s, 4 ms there and back: drafts are asked for behind long prompts."""
    pace, free, was_free = Pace(4, None), 0.0, 0.0
    waiting = []

    def send(now: float, rows: int, drafts: int, sequences: int) -> None:
        nonlocal free, was_free
        free = max(free, now) + rows * 65.5e-6
        was_free = max(was_free, free + 2e-3) + 1.5e-3
        waiting.append((was_free + 2e-3, pace.send(now, rows * ROW_BYTES, rows, drafts, sequences)))

    def take() -> None:
        for received, message in waiting:
            pace.take_answer(message, received, 1.5e-3, is_beside=True)
        waiting.clear()

    for i in range(4):
        send(0.1 * i, 512, 0, 0)
        send(0.1 * i + 6e-3, 8, 4, 8)
        send(0.1 * i + 12e-3, 20, 4, 8)
        take()
    assert not pace.cost.is_known
    for i in range(20):
        send(1.0 + 0.02 * i, 20 + 3 * (i % 20), 4, 16)
        take()
    trip_s, byte_s = pace.cost.link
    assert trip_s == pytest.approx(4e-3, rel=0.1)
    assert byte_s * ROW_BYTES == pytest.approx(65.5e-6, rel=0.1)


def test_rows_that_were_through_sooner_than_it_was_thought_say_nothing_of_the_way():
    answers = Answers()
    for i in range(20):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2e-3)
    known = answers.known
    answers.pace._link_free = 2.0 + 1.0  # as if bytes were to keep the link for a second
    answers.tell(2.0, 2.0 + 3e-3, 2e-3)
    assert answers.known == pytest.approx(known, rel=0.01)


def test_a_drafter_is_busy_while_histories_take_longer_than_a_step():
    pace, target = Pace(4, None, is_adaptive=True), learnt_target()
    for i in range(20):
        rows = (8, 24, 40)[i % 3]
        message = pace.send(0.1 * i, rows * ROW_BYTES, rows, 4, 8)
        pace.take_answer(message, 0.1 * i + 5e-3 + rows * 65e-6, 1e-3, is_beside=False)
    pace.cost.observe_histories(3e-3, 100, 2.0)
    pace.make_plan(2.0, Load(8, ROW_BYTES, running=8), target, Output(), {})
    pace.send(2.0, 600 * ROW_BYTES, 600, 4, 8)  # 39 ms, of drafts
    assert not pace.is_busy(2.0)
    history = pace.send(3.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    through = 39e-3 + pace.cost.histories_s(600)
    assert pace.is_busy(3.0 + through - 1.2 * FIXED_S)
    assert not pace.is_busy(3.0 + through - 0.8 * FIXED_S)
    pace.note_answer(history, 3.0 + 20e-3)  # sooner than it was thought
    assert not pace.is_busy(3.0 + 20e-3)
    pace.send(4.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    pace.note_answer(history, 4.0)  # of another message
    assert pace.is_busy(4.0)


def test_a_drafter_of_which_nothing_is_known_is_busy_until_it_answers_histories():
    pace = Pace(4, None, is_adaptive=True)
    message = pace.send(0.0, 600 * ROW_BYTES, 600, 0, 0, has_histories=True)
    assert pace.is_busy(100.0)
    pace.note_answer(message, 100.0)
    assert not pace.is_busy(100.0)
    pace.send(200.0, FIRST_BACKLOG_BYTES // 4, 32, 0, 0, has_histories=True)  # few that hardly delay anything
    assert not pace.is_busy(200.0)


def test_few_rows_of_histories_are_sent_at_once_until_the_link_is_known():
    pace = Pace(4, None, is_adaptive=True)
    assert pace.backlog_rows(0.0, ROW_BYTES) * ROW_BYTES == pytest.approx(FIRST_BACKLOG_BYTES, abs=ROW_BYTES)
    for i in range(20):
        rows = (8, 24, 40)[i % 3]
        message = pace.send(0.1 * i, rows * ROW_BYTES, rows, 0, 0)
        pace.take_answer(message, 0.1 * i + 5e-3 + rows * 65e-6, 1e-3, is_beside=False)
    per_row = 65e-6 + pace.cost.per_history_row
    assert pace.backlog_rows(2.0, ROW_BYTES) * per_row == pytest.approx(IDLE_BACKLOG_S, rel=0.05)  # no step is known
    pace.make_plan(2.0, Load(8, ROW_BYTES, running=8), learnt_target(), Output(), {})
    assert pace.backlog_rows(2.0, ROW_BYTES) * per_row == pytest.approx(FIXED_S, rel=0.1)
    assert pace.backlog_rows(2.0, ROW_BYTES, is_idle=True) * per_row == pytest.approx(4 * FIXED_S, rel=0.1)
    assert Pace(4, None).backlog_rows(0.0, ROW_BYTES) == MOST_ROWS


def test_a_way_that_grows_longer_than_the_time_between_messages_is_learnt():
    answers = Answers()
    for i in range(100):
        way_s = 1e-3 if i < 20 else 20e-3
        answers.tell(6e-3 * i, 6e-3 * i + 2e-3 + way_s, 2e-3)
    assert answers.known == pytest.approx((20e-3, 2e-3), rel=0.05)


def test_a_drafter_computes_for_no_longer_than_its_answer_took_whatever_it_says():
    answers = Answers()
    for i in range(50):
        answers.tell(0.1 * i, 0.1 * i + 3e-3, 2.0)
    assert answers.known == pytest.approx((0.0, 3e-3), abs=0.1e-3)


def test_a_message_without_rows_says_nothing_of_computing():
    answers, others = Answers(), Answers()
    for i in range(50):
        message = answers.pace.send(0.1 * i, 0, 0, 0, 0)
        answers.pace.take_answer(message, 0.1 * i + 1e-3, 0.0, is_beside=False)
        for one in (answers, others):
            one.tell(0.1 * i + 50e-3, 0.1 * i + 53e-3, 2e-3)
    assert answers.pace.cost.compute == others.pace.cost.compute


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


# What became of forecasts: 1000 verify steps of sequences a second, each of 4 drafts and 3 tokens, make 3000 tokens.

TOKENS = [1.0, 1.8, 2.3, 2.7, 3.0]
OTHERS = [1.0, 1.1, 1.2, 1.3, 1.4]
"""Of a worse drafter."""


class Windows:
    """Of 50 ms each, with ten steps, unless said otherwise, that are compared with the forecast of a plan."""

    def __init__(self) -> None:
        self.hindsight = Hindsight()
        self.verified = Counter[tuple[str, int]]()
        self.now, self.rate = 100.0, 3000.0
        self._seconds, self._steps = 0.0, 0
        self.made: Made | None = None  # in the last one

    def turn_to(self, scale: int, *, is_alone: bool = True) -> float:
        """The share of one group at that scale of the load."""
        self.hindsight.turn_to(scale, self.now, is_alone=is_alone)
        return self.hindsight.shares[1]

    def pass_by(
        self, share: float, count: int = 1, *, drafts: int = 4, groups: int = 1, steps: int = 10, **load: int
    ) -> None:
        """So many windows, in which that share of the verify steps comes that should."""
        plan = Plan(drafts, groups)
        for _ in range(count):
            self.now += 0.05
            self._seconds += 0.05
            self._steps += steps
            self.verified["own" if drafts else "", drafts] += round(share * 50)
            output = Output(self.verified.copy(), self._steps, self._seconds)
            rate = self.rate if drafts else 1000.0
            now, known = Load(**{"sequences": 32, "row_bytes": 1, **load}), {"own": TOKENS, "other": OTHERS}
            self.made = self.hindsight.take(self.now, plan, now, rate, output, known)


def test_each_number_of_groups_has_its_own_share_of_the_forecast_and_no_drafts_too():
    windows = Windows()
    for share, drafts, groups in ((0.9, 4, 1), (0.7, 4, 3), (0.8, 0, 1)):
        windows.pass_by(share, 10, drafts=drafts, groups=groups)
    assert windows.hindsight.shares == pytest.approx([0.8, 0.9, 1.0, 0.7, 1.0], abs=0.01)


def test_a_plan_that_changes_all_the_time_shows_nothing():
    windows = Windows()
    for _ in range(10):
        windows.pass_by(0.5, drafts=4)
        windows.pass_by(0.5, drafts=3)
    assert windows.hindsight.shares == [1.0] * 5


@pytest.mark.parametrize(("before", "groups"), [(2, 1), (1, 2), (1, 4)])
def test_steps_on_their_way_when_a_plan_is_taken_up_tell_nothing_of_it(before, groups):
    """Windows are as long as a step. The plan changes at the end of one; of the one before it come another that has
    landed and is not counted, and those of the groups, and then the window that begins in the last of these."""
    windows = Windows()
    windows.pass_by(1.0, 10, groups=before, steps=1)
    windows.pass_by(0.5, 2 + max(before, groups), groups=groups, steps=1)
    windows.pass_by(0.9, LEAST_WINDOWS, groups=groups, steps=1)
    assert windows.hindsight.shares[groups] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("loads", [({}, {"sequences": 40}), ({"behind": 5}, {"behind": 32})])
def test_a_window_in_which_many_sequences_have_come_or_are_behind_tells_nothing(loads):
    windows = Windows()
    for i in range(20):
        windows.pass_by(0.5, **loads[i % 2])
    assert windows.hindsight.shares == [1.0] * 5
    for i in range(20):
        windows.pass_by(0.5, sequences=(32, 33)[i % 2], behind=i % 3)
    assert windows.hindsight.shares[1] == pytest.approx(0.5)


def test_what_comes_while_others_alone_draft_says_nothing_of_no_drafts():
    windows = Windows()
    windows.pass_by(0.6, 10, drafts=0, decoding=40)
    assert windows.hindsight.shares == [1.0] * 5
    windows.pass_by(0.7, 10, drafts=4, decoding=40)
    windows.pass_by(0.8, 10, drafts=0)
    assert windows.hindsight.shares == pytest.approx([0.8, 0.7, 1.0, 1.0, 1.0], abs=0.01)


def test_what_came_is_told_where_it_is_of_a_steady_load():
    windows = Windows()
    windows.pass_by(0.5)
    assert windows.made is None  # nothing came before it
    windows.pass_by(0.5)
    assert windows.made == pytest.approx(Made(25 * TOKENS[4], 0.05))
    windows.pass_by(0.5, behind=32)  # whatever they lack
    windows.pass_by(0.5, groups=2)  # and the plan
    assert windows.made == pytest.approx(Made(25 * TOKENS[4], 0.05))
    for load in ({"sequences": 36}, {"other_tokens": 8, "other_rows": 8}, {"decoding": 48}):
        windows.pass_by(0.5)
        windows.pass_by(0.5)
        assert windows.made is not None
        windows.pass_by(0.5, **load)
        assert windows.made is None
    windows.pass_by(0.5, 2)
    windows.hindsight.pause()
    windows.pass_by(0.5)
    assert windows.made is None


def test_one_step_that_stalls_is_no_share_of_a_forecast():
    windows = Windows()
    windows.pass_by(1.0, 4)
    windows.pass_by(0.0)
    windows.pass_by(1.0, 2)
    assert windows.hindsight.shares[1] == pytest.approx(1.0)


def test_drafts_that_were_to_come_and_did_not_lower_the_share():
    """Two thirds of the sequences decode without, so that steps come more often than forecast."""
    windows = Windows()
    for _ in range(6):
        windows.verified["own", 0] += 40
        windows.pass_by(0.4)
    assert windows.hindsight.shares[1] == pytest.approx((0.4 * 3000 + 0.8 * 1000) / 3000, rel=0.01)


def test_steps_of_other_drafters_bring_what_those_bring_and_without_any_one_token():
    windows = Windows()
    windows.rate = 3000 + 1400 + 200 + 1000
    for _ in range(6):
        windows.verified["other", 4] += 50
        windows.verified["", 0] += 10
        windows.verified["gone", 4] += 50
        windows.pass_by(1.0)
    assert windows.hindsight.shares[1] == pytest.approx(1.0)


def test_a_drafter_with_more_drafts_than_this_one_counts_as_its_most():
    windows = Windows()
    for _ in range(6):
        windows.verified["own", 9] += 50
        windows.pass_by(0.0)
    assert windows.hindsight.shares[1] == pytest.approx(1.0)


def test_what_is_known_of_a_plan_that_is_not_in_use_comes_near_to_what_the_one_in_use_shows():
    windows = Windows()
    windows.pass_by(0.5, 10)
    windows.pass_by(0.9, 5, drafts=0)
    before = windows.hindsight.shares[1]
    assert before == pytest.approx(0.5, abs=0.01)
    windows.pass_by(0.9, round(HALF_LIFE_S / 0.05), drafts=0)
    assert windows.hindsight.shares[1] == pytest.approx((before + 0.9) / 2, abs=0.01)


@pytest.mark.parametrize(
    ("before", "sequences", "scale"),
    [(0, 1, 1), (0, 32, 6), (0, 63, 6), (6, 22, 6), (6, 21, 5), (6, 94, 6), (6, 95, 7), (1, 2, 2), (7, 1, 1)],
)
def test_a_scale_of_the_load_is_kept_until_it_is_left_by_far(before, sequences, scale):
    assert scale_of(sequences, before) == scale


def test_each_scale_of_the_load_has_shares_of_its_own():
    windows = Windows()
    windows.turn_to(6)
    windows.pass_by(0.5, 10)
    assert windows.turn_to(5) == pytest.approx(0.5**0.5, abs=0.01)
    assert windows.turn_to(1) == pytest.approx(0.5 ** (0.5**5), abs=0.01)
    windows.pass_by(0.9, 10, sequences=1)
    assert windows.turn_to(6) == pytest.approx(0.5, abs=0.01)
    assert windows.turn_to(1) == pytest.approx(0.9, abs=0.01)


def test_what_others_drafting_costs_says_nothing_of_when_they_do_not():
    windows = Windows()
    windows.turn_to(6, is_alone=False)
    windows.pass_by(0.5, 10)
    assert windows.turn_to(6) == 1.0
    windows.pass_by(0.9, 10)
    assert windows.turn_to(6, is_alone=False) == pytest.approx(0.5, abs=0.01)
    assert windows.turn_to(5) == pytest.approx(0.9**0.5, abs=0.01)


def test_a_scale_of_which_nothing_was_learnt_says_nothing_of_others():
    windows = Windows()
    for scale in range(1, 6):
        windows.turn_to(scale)
        windows.pass_by(0.5, LEAST_WINDOWS)
    windows.turn_to(6)
    windows.pass_by(0.3, 10)
    assert windows.turn_to(5) == pytest.approx(0.3**0.5, abs=0.01)


def test_what_was_learnt_at_another_scale_counts_half_after_a_while():
    windows = Windows()
    windows.turn_to(1)
    windows.pass_by(0.25, 10, sequences=1)
    windows.turn_to(6)
    windows.pass_by(1.0, 10)
    windows.now += HALF_LIFE_S
    assert windows.turn_to(1) == pytest.approx(0.5, abs=0.02)
    windows.turn_to(6)
    windows.now += 30 * HALF_LIFE_S
    assert windows.turn_to(1) == pytest.approx(1.0, abs=0.01)


def test_what_comes_while_the_load_changes_its_scale_is_no_window():
    windows = Windows()
    windows.pass_by(1.0, 10)
    for scale in (5, 6, 5, 6):
        windows.turn_to(scale)
        windows.pass_by(0.5, LEAST_WINDOWS - 1)
    assert windows.hindsight.shares[1] == pytest.approx(1.0)


def test_what_comes_while_nothing_is_forecast_is_no_window():
    windows = Windows()
    windows.pass_by(1.0, 10)
    for _ in range(5):
        windows.hindsight.pause()
        windows.verified["own", 4] += 1000
        windows.pass_by(1.0, 2)
    assert windows.hindsight.shares[1] == pytest.approx(1.0)


def test_steps_with_prompts_and_those_behind_them_are_no_output():
    gate = StepGate({}, {}, Profile())
    costs = {"step_s": 1e-3, "host_s": 0.0, "verified": {("one", 4): 2, ("gone", 4): 1, ("", 0): 1}}
    landed = 0.0
    for has_prompts in (True, False, False, False, True, False, False):
        landed += 3.0 if has_prompts else 1.0
        gate.count_step(5, has_prompts=has_prompts, landed=landed, **costs)
    assert gate.output(["one"]) == Output(Counter({("one", 4): 6, ("", 0): 3}), 3, 3.0)
    assert gate.output(["gone"]) == gate.output(["one"]) == Output(Counter({("", 0): 3}), 3, 3.0)
    gate.count_step(5, has_prompts=False, is_delayed=True, landed=landed + 9.0, **costs)
    assert gate.output(["one"]).seconds == 3.0


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


# Plans. With c = 0.75, k = 4 emits 3.05 tokens.


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


# Holding a step.

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
