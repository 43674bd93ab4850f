"""The pace of one drafter: when its answers are expected, how long they are waited for, how many bytes may be sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from draftwire.v1.generate_pb2 import DraftPlan
from verifier_service.pacing.costs import Acceptance, DrafterCost, TargetCost
from verifier_service.pacing.governor import KEEP_ABOVE, NUM_SCOUTS, Governor
from verifier_service.pacing.grouping import Expected, Group
from verifier_service.pacing.hindsight import Hindsight, Output, scale_of
from verifier_service.pacing.link import Link, Message
from verifier_service.pacing.plan import Forecast, Load, Plan

# How often the plan is made anew.
PLAN_EVERY_S = 0.05
# Drafts are waited for until so many standard deviations after their expected time.
PATIENCE_DEVIATIONS = 4.0
# Fewer rows of prompts and histories than this are not worth a message while others are on their way.
LEAST_BACKLOG_ROWS = 16
MOST_ROWS = 1 << 30
# Bytes of them in a message as long as nothing is known of the link.
FIRST_BACKLOG_BYTES = 1 << 20
# Steps without its sequences that a trial lasts longer than its drafts are waited for, where others go on: the rest of
# one, and one that is launched before it is known how many drafts were accepted. Accepted drafts make up for them.
TRIAL_STEPS = 2
# Where the drafter is asked for none, or no step is known, they may keep the link busy for so long.
IDLE_BACKLOG_S = 0.05


class Pace:
    """Costs and plan of one drafter. Used by the engine's thread alone, but for `outlook`.

    Attributes
    ----------
    outlook
        What is asked for, and what is expected of it, as of the last plan; None while too little is known for one.
    histories_sent
        Monotonic time at which rows of prompts and histories were sent last; minus infinity before.
    """

    def __init__(self, max_drafts: int, deadline_s: float | None, *, is_adaptive: bool = False) -> None:
        """
        Parameters
        ----------
        max_drafts
            Most drafts of a sequence, by the operator's settings and the head's.
        deadline_s
            How long drafts are waited for at most; None without an end.
        is_adaptive
            Whether fewer drafts, or none, are asked for where that is faster.
        """
        self.cost = DrafterCost()
        self.acceptance = Acceptance(max_drafts)
        self.governor = Governor(max_drafts, is_adaptive=is_adaptive)
        self.outlook: DraftPlan | None = None
        self._hindsight = Hindsight()
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._max_drafts = max_drafts
        self._planned = 0.0
        self._step_s = math.inf  # of a step without drafts
        self._skips = False
        self._link = Link(self.cost)
        self._num_sent = 0
        self.histories_sent = -math.inf
        self._histories: Message | None = None  # the last one with any, as long as it is not answered
        self._last_expected = 0.0
        self._heard = 0.0  # when the last answer came
        self._has_others = False  # whether there are rows of others in each step

    @property
    def is_off(self) -> bool:
        """Whether the drafter is asked for no drafts."""
        return self.governor.is_off

    @property
    def plan(self) -> Plan:
        """Drafts of each sequence, and groups that take turns."""
        return self.governor.plan

    def send(
        self,
        now: float,
        num_bytes: int,
        rows: int,
        drafts: int,
        sequences: int,
        *,
        has_histories: bool = False,
        waits: bool = True,
    ) -> Message:
        """Notes a message and when its answer is expected; its drafts are waited for if it `waits`.

        It `has_histories` where a sequence's rows are more than those of a verify step.
        """
        compute_s = expected = 0.0
        is_of_drafts = not has_histories and self._is_of_drafts(rows, sequences)
        if self.cost.is_known if is_of_drafts else self.cost.is_link_known:
            begins = max(now, self._link.free()) + self.cost.transfer_s(num_bytes)
            if is_of_drafts:
                compute_s = self.cost.compute_s(rows, drafts, sequences, is_beside=self._is_beside)
            else:
                compute_s = self.cost.histories_s(rows)
            expected = self._last_expected = max(begins, self._last_expected) + compute_s
        wait_until = now + (self.patience_s(drafts, max(0.0, expected - now)) if waits else 0.0)
        self._num_sent += 1
        what = (num_bytes, rows, drafts, sequences)
        message = Message(self._num_sent, now, *what, compute_s, expected, wait_until, has_histories)
        self._link.send(message)
        if has_histories:
            self.histories_sent, self._histories = now, message
        return message

    def _is_of_drafts(self, rows: int, sequences: int) -> bool:
        """Whether a message asks for drafts of so many sequences behind rows of a verify step, and has no others."""
        return 0 < rows <= (self._max_drafts + 1) * sequences

    @property
    def _is_beside(self) -> bool:
        """Whether steps run while the drafter computes, as planned."""
        return self.plan.num_groups > 1 or self._has_others

    def note_answer(self, message: Message, received: float) -> None:
        """Notes that an answer has come, of which something is learnt later: those behind it come after it."""
        self._heard = max(self._heard, received)
        if self._link.note_answer(message, received):
            self._last_expected = min(self._last_expected, received)
        if self._histories is not None and message.number >= self._histories.number:
            self._histories = None

    def take_answer(self, message: Message, received: float, compute_s: float, *, is_beside: bool) -> None:
        """Learns from an answer.

        Parameters
        ----------
        received
            Monotonic time at which it came.
        compute_s
            Computing time, as the drafter tells it.
        is_beside
            Whether a step ran between the two.
        """
        compute_s = min(compute_s, received - message.sent)
        # Messages that it takes together have one computing time.
        is_single = compute_s <= received - self._link.last_answer
        self._link.learn(message, received, compute_s)
        if not is_single or message.rows == 0:
            return
        if not message.has_histories and self._is_of_drafts(message.rows, message.sequences):
            self.cost.observe_compute(
                compute_s, message.rows, message.drafts, message.sequences, received, is_beside=is_beside
            )
        else:
            self.cost.observe_histories(compute_s, message.rows, received)

    def expect(self, message: Message, redraft_s: float = math.inf) -> Expected | None:
        """The group whose drafts the answer brings; None when there is none or its time is not known. `redraft_s`: see
        `Expected`."""
        if message.sequences == 0 or message.expected == 0.0:
            return None
        tokens = message.sequences * self.acceptance.expected_tokens()[message.drafts]
        group = Group(message.sequences * (message.drafts + 1), tokens)
        expected = max(message.expected, self._heard + message.compute_s)
        return Expected(group, expected, message.wait_until, redraft_s)

    def patience_s(self, num_drafts: int, expected_s: float = 0.0) -> float:
        """How long drafts that are asked for now, and expected in so many seconds, are waited for.

        Where the number of drafts adapts that is about as long as they can gain: a step without drafts brings one
        token, so that k drafts never bring more than k such steps.
        """
        if not self.governor.is_adaptive:
            return self._deadline_s
        gain_s = num_drafts * self._step_s
        return min(self._deadline_s, max(gain_s, expected_s + PATIENCE_DEVIATIONS * self.cost.jitter))

    def answer_s(self, sequences: int, row_bytes: int) -> float:
        """Expected time from the tokens of so many sequences to their drafts; infinite where none are asked for or
        nothing is known of it."""
        drafts = self.plan.num_drafts
        if drafts == 0 or not self.cost.is_known:
            return math.inf
        rows = round(sequences * self.acceptance.expected_tokens()[drafts])
        compute_s = self.cost.compute_s(rows, drafts, sequences, is_beside=self._is_beside)
        return self.cost.transfer_s(rows * row_bytes) + compute_s

    def backlog_rows(self, now: float, row_bytes: int, *, is_idle: bool = False) -> int:
        """How many rows of prompts and histories may be sent now, so that they delay no drafts.

        They are to be through when the step that runs next is, before which nothing is asked for, or later where it
        `is_idle`: where nothing is. Where every step is to have its drafts, none of them waits: a sequence whose rows
        are not all there decodes without.
        """
        if not self.governor.is_adaptive:
            return MOST_ROWS
        if not self.cost.is_link_known:
            return max(LEAST_BACKLOG_ROWS, FIRST_BACKLOG_BYTES // row_bytes)
        horizon = 0.0 if math.isinf(self._step_s) else self._step_s * (self._max_drafts if is_idle else 1)
        if self.is_off or horizon == 0.0:
            horizon = max(horizon, IDLE_BACKLOG_S)
        free = self._link.free()
        rows = self.rows_within(now + horizon - max(now, free), row_bytes)
        if rows < LEAST_BACKLOG_ROWS:
            return 0 if free > now else LEAST_BACKLOG_ROWS
        return rows

    def rows_within(self, seconds: float, row_bytes: int) -> int:
        """How many rows of prompts and histories are expected to go through in so long."""
        per_row = self.cost.link[1] * row_bytes + self.cost.per_history_row
        return int(min(max(0.0, seconds) / per_row, MOST_ROWS)) if per_row > 0.0 else MOST_ROWS

    def steps_within(self, seconds: float) -> float:
        """How many steps without drafts there are in so long; infinite where none is known."""
        return math.inf if math.isinf(self._step_s) else seconds / self._step_s

    def is_busy(self, now: float) -> bool:
        """Whether rows of prompts and histories keep the link or the drafter for longer than a step without drafts
        takes: drafts that are asked for after that step come as soon as those behind them. As long as too little is
        known of the link, whether any that are about as many as are sent then are not answered yet."""
        message = self._histories
        if message is None:
            return False
        if not self.cost.is_link_known:
            return 2 * message.num_bytes >= FIRST_BACKLOG_BYTES
        return max(self._link.free(message), message.expected - self.cost.link[0]) - now > self._step_s

    def is_due(self, now: float) -> bool:
        """Whether it is time for a new plan."""
        return now >= self._planned + PLAN_EVERY_S

    def make_plan(
        self, now: float, load: Load, target: TargetCost, output: Output, expected: Mapping[str, Sequence[float]]
    ) -> None:
        """Decides how many drafts are asked for, and into how many groups the sequences part.

        Parameters
        ----------
        output
            What all steps so far have brought.
        expected
            Tokens of a verify step of 0, 1, .. drafts, by drafter.
        """
        self._planned, self._has_others = now, load.other_rows > 0
        if load.sequences == 0 or not target.is_known:
            self._hindsight.pause()
            return
        self._step_s = target.seconds(load.small_step)
        # Where too little is known of the drafter, the forecast is as if it took no time: what it loses while sequences
        # catch up counts nevertheless, and once it has rested for that it is tried again.
        if not (self.cost.is_known or load.asks_nothing or self.is_off):
            self._hindsight.pause()
            return
        scale = scale_of(load.running, self._hindsight.scale)
        self._hindsight.turn_to(scale, now, is_alone=load.decoding == 0)
        tokens, shares = self.acceptance.expected_tokens(), self._hindsight.shares
        forecast = partial(Forecast, load, target=target, drafter=self.cost, deadline_s=self._deadline_s, shares=shares)
        likely = forecast(tokens=tokens)
        rate = likely.rate(self.plan) / shares[self.plan.turns]
        made = self._hindsight.take(now, self.plan, load, rate, output, expected)
        optimistic = likely
        if self.governor.is_adaptive and (self.is_off or likely.gain < KEEP_ABOVE):
            optimistic = forecast(tokens=[1.0 + count for count in range(self._max_drafts + 1)])
        self.governor.decide(now, likely, optimistic, scale, made=made, asks_nothing=load.asks_nothing)
        if self.cost.is_known:
            self.outlook = self._outlook(likely)
        self.acceptance.forget_over(0 if self.is_off else load.sequences)
        if self.is_off:
            scouts = min(NUM_SCOUTS, load.sequences)
            drafts = self.governor.trial_drafts
            has_others = load.running > scouts
            compute_s = self.cost.compute_s(scouts, drafts, scouts, is_beside=has_others)
            stall_s = self.cost.transfer_s(0) + compute_s
            if has_others:
                stall_s += max(0.0, TRIAL_STEPS - (tokens[drafts] - 1.0)) * self._step_s
            self.governor.allow_trials(optimistic, stall_s)

    def _outlook(self, forecast: Forecast) -> DraftPlan:
        best = forecast.best()
        trip_s, features_s, compute_s = forecast.answer_s(best)
        return DraftPlan(
            num_drafts=self.plan.num_drafts,
            num_groups=self.plan.num_groups,
            best_num_drafts=best.num_drafts,
            best_num_groups=best.num_groups,
            expected_gain=forecast.gain,
            trip_s=trip_s,
            features_s=features_s,
            compute_s=compute_s,
            step_s=self._step_s,
        )

    def pause(self) -> None:
        """What comes up to the next plan is not compared with a forecast."""
        self._hindsight.pause()

    def skip_drafts(self) -> None:
        """Has the next message ask for no drafts, so that the cost of a step without any shows."""
        self._skips = True

    @property
    def skips_next(self) -> bool:
        """Whether the next message asks for none."""
        return self._skips

    def take_num_drafts(self, has_rows: bool) -> int:
        """Drafts to ask for of each sequence in the next message."""
        skips, self._skips = self._skips and has_rows, self._skips and not has_rows
        return 0 if skips else self.plan.num_drafts

    def group_size(self, sequences: int) -> int:
        """How many of so many sequences one step takes."""
        return -(-sequences // self.plan.num_groups)

    def share_of_step(self, sequences: int) -> tuple[float, float]:
        """Rows and expected tokens of so many sequences in a step, on average."""
        drafts, groups = self.plan.num_drafts, self.plan.num_groups
        tokens = self.acceptance.expected_tokens()[drafts]
        return sequences * (drafts + 1) / groups, sequences * tokens / groups
