"""What became of forecasts."""

from __future__ import annotations

from collections import Counter

import pytest

from verifier_service.pacing import Hindsight, Load, Made, Output, Plan, Profile
from verifier_service.pacing.hindsight import HALF_LIFE_S, LEAST_WINDOWS, scale_of
from verifier_service.step_gate import StepGate

# 1000 verify steps of sequences a second, each of 4 drafts and 3 tokens, make 3000 tokens.
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
