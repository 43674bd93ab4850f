"""The pacing policy (all drafts or none, by measured throughput), and the rows of a backlog in each message."""

from __future__ import annotations

from typing import Any

import pytest
from drafting_scene import Scene

from verifier_service.pacing import Backlog, Calibration, DraftingPolicy, Profile, StepCosts, StepCount
from verifier_service.pacing.backlog import CATCH_UP_EVERY_S, FIRST_BYTES, LEAST_BYTES, MOST_BYTES
from verifier_service.pacing.policy import LOSS_SHARE, REST_S

K = 4
RATE = 0.75
TOKENS = [sum(RATE**i for i in range(1 + drafts)) for drafts in range(1 + K)]
STEP_S = 5e-3


class Rounds:
    """Rounds with one drafter; a round with k drafts takes `round_s[k]` seconds."""

    def __init__(self, *round_s: float, requests: int = 8, profile: Profile | None = None, **options: Any) -> None:
        self.round_s = list(round_s)
        self.requests = requests
        self.has_prompts = False
        self.now = 100.0
        self.tokens = 0.0
        self.asked: list[int] = []
        calibration = Calibration(K, [RATE] * K)
        self.costs = StepCosts(profile or Profile())
        self.policy = DraftingPolicy(K, calibration, self.costs, **{"is_adaptive": True, **options})

    def run(self, seconds: float) -> float:
        """Return the throughput of a request relative to its throughput without drafts."""
        began, before = self.now, self.tokens
        while self.now < began + seconds:
            number = self.policy.num_drafts
            taken = self.round_s[number]
            self.now += taken
            self.tokens += TOKENS[number]
            self.asked.append(number)
            drafted = self.requests if number else 0
            others = 0.0 if number else float(self.requests)
            load = (self.requests, number, drafted, others, False, False, self.has_prompts)
            step = StepCount(self.now, taken, STEP_S, *load)
            self.policy.count(step)
        return (self.tokens - before) / (self.now - began) * self.round_s[0]


NEAR = (STEP_S, 6.4e-3, 6.7e-3, 7.1e-3, 7.5e-3)
FAR = (STEP_S, 30e-3, 30e-3, 30e-3, 30e-3)


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_a_near_drafter_is_asked_for_all_from_the_start(requests):
    rounds = Rounds(*NEAR, requests=requests, profile=Profile({(64, 64): STEP_S, (64, 320): STEP_S}))
    assert rounds.run(0.1) == pytest.approx(TOKENS[K] * STEP_S / NEAR[K], rel=0.04)
    assert rounds.run(5.0) > 0.99 * TOKENS[K] * STEP_S / NEAR[K]
    assert set(rounds.asked) == {K}  # the profile has the time of a step without drafts


def test_the_time_without_drafts_is_measured_once():
    rounds = Rounds(*NEAR)
    rounds.run(10.0)
    assert 0 < rounds.asked.count(0) < 0.02 * len(rounds.asked)


@pytest.mark.parametrize("stalls", [1, 2, 3])
def test_slow_first_steps_do_not_disable_drafts(stalls):
    """The first steps of a process load kernels, which takes a hundred times a step's time."""
    rounds = Rounds(*NEAR, profile=Profile({(64, 64): STEP_S}))
    rounds.round_s[K] = 100 * STEP_S
    rounds.run(stalls * 100 * STEP_S)
    rounds.round_s[K] = NEAR[K]
    rounds.run(1.0)
    assert set(rounds.asked) == {K}


def test_drafts_that_lose_are_given_up_soon():
    rounds = Rounds(*FAR)
    rounds.run(1.0)
    assert rounds.policy.is_off
    assert rounds.run(60.0) > 1 - 1.5 * LOSS_SHARE


def test_drafts_come_back_when_the_drafter_is_near_again():
    rounds = Rounds(*FAR)
    rounds.run(10.0)
    rounds.round_s = list(NEAR)
    rounds.run(REST_S[1] + 1.0)
    assert rounds.run(5.0) > 1.8


def test_each_load_has_its_own_decision():
    rounds = Rounds(*NEAR, requests=2)
    rounds.run(5.0)
    rounds.requests, rounds.round_s = 32, list(FAR)
    rounds.run(5.0)
    assert rounds.policy.is_off
    rounds.requests, rounds.round_s = 2, list(NEAR)
    rounds.run(0.1)
    assert not rounds.policy.is_off


TABLE = Profile({(64, 64): STEP_S, (64, 320): STEP_S})


def test_a_loss_beside_prompts_ends_with_the_prompts():
    """Requests that arrive together have prompts in each step, and drafts cost more than they gain in these steps."""
    rounds = Rounds(*FAR, profile=TABLE)
    rounds.has_prompts = True
    rounds.run(1.0)
    assert rounds.policy.is_off
    rounds.has_prompts, rounds.round_s = False, list(NEAR)
    rounds.run(20 * STEP_S)
    assert not rounds.policy.is_off


def test_when_prompts_begin_disabled_drafts_stay_disabled():
    rounds = Rounds(*FAR, profile=TABLE)
    rounds.run(1.0)
    rounds.has_prompts = True
    before = len(rounds.asked)
    rounds.run(20 * STEP_S)
    assert set(rounds.asked[before:]) == {0}


def test_when_prompts_begin_drafts_that_gain_without_them_stay():
    rounds = Rounds(*FAR, profile=TABLE)
    rounds.has_prompts = True
    rounds.run(1.0)
    rounds.has_prompts, rounds.round_s = False, list(NEAR)
    rounds.run(0.5)
    before = len(rounds.asked)
    rounds.has_prompts = True
    rounds.run(0.2)
    assert set(rounds.asked[before:]) == {K}


def test_a_few_steps_with_prompts_do_not_count():
    rounds = Rounds(*NEAR, profile=TABLE)
    rounds.round_s[K] = 0.99 * TOKENS[K] * STEP_S  # gains little
    rounds.run(1.0)
    for _ in range(20):
        rounds.has_prompts, rounds.round_s[K] = True, FAR[K]
        rounds.run(FAR[K])
        rounds.has_prompts, rounds.round_s[K] = False, 0.99 * TOKENS[K] * STEP_S
        rounds.run(8 * rounds.round_s[K])
    assert set(rounds.asked) == {K}


def test_the_time_without_drafts_follows_the_passes_that_ran():
    """The table lacks attention over the contexts."""
    rounds = Rounds(*NEAR, profile=TABLE)
    rounds.run(0.1)
    assert rounds.policy.speed_without() == pytest.approx(1 / STEP_S)
    for _ in range(500):
        rounds.costs.count(64, 320, 2 * STEP_S)
    assert rounds.policy.speed_without() == pytest.approx(1 / (2 * STEP_S), rel=0.02)


class Counted:
    """A `Drafting` with one decoding request, and the steps that its policy counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, profile: Profile | None = TABLE, k: int = K) -> None:
        self.scene = Scene(profile=profile)
        stream = self.scene.connect()
        self.scene.decode(k=k)
        self.scene.flush()
        self.steps: list[StepCount] = []
        monkeypatch.setattr(self.scene.drafting.sessions[stream].pace.policy, "count", self.steps.append)
        self.count(0.0)
        self.count(STEP_S)
        self.steps.clear()

    def count(self, landed: float, num_prompt_rows: int = 0, step_s: float = STEP_S, num_waiting: int = 0) -> None:
        self.scene.drafting.count_step(
            has_prompts=num_prompt_rows > 0,
            step_s=step_s,
            host_s=0.0,
            verified={(None, 0): 1},
            num_rows=1 + num_prompt_rows,
            num_prompt_rows=num_prompt_rows,
            num_waiting=num_waiting,
            landed=landed,
            is_beside=False,
        )


def test_the_time_of_rows_of_prompts_does_not_count(monkeypatch):
    counted = Counted(monkeypatch)
    counted.count(6 * STEP_S, num_prompt_rows=512, step_s=4 * STEP_S, num_waiting=2)  # a gap of one step's time before
    (step,) = counted.steps
    assert (step.seconds, step.pass_s) == pytest.approx((2 * STEP_S, STEP_S))
    assert (step.has_prompts, step.requests) == (True, 3)


def test_without_a_table_steps_with_prompts_do_not_count(monkeypatch):
    counted = Counted(monkeypatch, profile=None)
    counted.count(6 * STEP_S, num_prompt_rows=512, step_s=4 * STEP_S)
    assert counted.steps == []


def test_steps_of_requests_that_want_no_drafts_do_not_count(monkeypatch):
    counted = Counted(monkeypatch, k=0)
    counted.count(2 * STEP_S)
    assert counted.steps == []


def test_without_adaptive_k_all_are_asked_for():
    rounds = Rounds(*FAR, is_adaptive=False)
    rounds.run(5.0)
    assert set(rounds.asked) == {K}
    assert rounds.policy.speeds()[K] > 0.0  # still measured


ROW = 1024


def test_no_rows_go_before_the_last_ones_are_answered():
    backlog = Backlog(is_local=False)
    assert backlog.rows(ROW) == FIRST_BYTES // ROW
    backlog.count_sent(1.0, 7)
    backlog.note_answer(6)
    assert (backlog.rows(ROW), backlog.may_send(2.0)) == (0, False)
    backlog.note_answer(8)  # answers the earlier messages too
    backlog.learn(FIRST_BYTES, 0.01, in_time_s=0.02)
    assert backlog.rows(ROW) > FIRST_BYTES // ROW
    assert not backlog.may_send(1.0 + CATCH_UP_EVERY_S / 2)
    assert backlog.may_send(1.0 + CATCH_UP_EVERY_S)


def test_a_message_shrinks_while_answers_are_late():
    backlog = Backlog(is_local=True)
    assert backlog.rows(ROW) == MOST_BYTES // ROW
    for _ in range(40):
        backlog.learn(MOST_BYTES, 0.03, in_time_s=0.02)
    assert backlog.rows(ROW) == LEAST_BYTES // ROW
