"""The pace of one drafter: number of drafts, expected answer time, and maximum wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.v1.generate_pb2 import DraftPlan
from verifier_service.pacing.backlog import Backlog
from verifier_service.pacing.calibration import Calibration
from verifier_service.pacing.policy import DraftingPolicy
from verifier_service.pacing.step_costs import Profile, StepCosts

# Smoothing of answer times and of their deviations, and number of deviations in a wait, as in TCP (RFC 6298).
SMOOTH, SMOOTH_DEVIATION, DEVIATIONS = 1 / 8, 1 / 4, 4.0


@dataclass(frozen=True)
class Message:
    """An unanswered message to a drafter."""

    number: int  # number of the message to this drafter
    sent: float  # monotonic time
    num_bytes: int
    rows: int
    drafts: int  # drafts requested for each sequence with drafts
    sequences: int  # number of sequences with requested drafts
    wait_until: float  # monotonic time until which requests wait for its drafts
    has_backlog: bool = False  # whether it has backlog rows


class Pace:
    """The number of drafts requested from one drafter, and how long requests wait for them.

    Only the engine's thread uses it, except for `describe`.
    """

    def __init__(
        self,
        max_drafts: int,
        deadline_s: float | None,
        costs: StepCosts | None = None,
        *,
        is_adaptive: bool = False,
        is_local: bool = False,
        rates: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            max_drafts: Maximum drafts per sequence of configuration and head.
            deadline_s: Maximum wait for drafts in seconds; None for no limit.
            costs: Seconds of passes.
            is_adaptive: Whether fewer drafts, or none, are requested if that is faster.
            is_local: Whether features travel through shared memory.
            rates: Conditional acceptance rates of the positions for synthetic acceptance.
        """
        self.calibration = Calibration(max_drafts, rates)
        costs = costs or StepCosts(Profile())
        self.policy = DraftingPolicy(max_drafts, self.calibration, costs, is_adaptive=is_adaptive)
        self.backlog = Backlog(is_local=is_local)
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._answer_s = math.nan  # smoothed seconds from a message to its drafts
        self._deviation_s = 0.0
        self._num_sent = 0

    @property
    def is_adaptive(self) -> bool:
        """Return whether fewer drafts, or none, are requested if that is faster."""
        return self.policy.is_adaptive

    @property
    def is_off(self) -> bool:
        """Return whether the drafter is sent nothing, because drafts lower the throughput."""
        return self.policy.is_off

    @property
    def num_drafts(self) -> int:
        """Return the number of drafts to request for each sequence."""
        return self.policy.num_drafts

    @property
    def answer_s(self) -> float:
        """Return the expected seconds from a message to its drafts; NaN before the first answer."""
        return self._answer_s

    def patience_s(self, num_drafts: int, step_s: float) -> float:
        """Return the maximum wait in seconds for `num_drafts` drafts requested now.

        With adaptive k this is the larger of the usual answer time and the time that drafts can save: k drafts save at
        most k steps. `step_s`: seconds of a step, NaN if unknown.
        """
        longest_s = max(num_drafts * step_s, self._answer_s + DEVIATIONS * self._deviation_s)
        is_known = self.is_adaptive and not math.isnan(step_s) and not math.isnan(self._answer_s)
        return min(self._deadline_s, longest_s) if is_known else self._deadline_s

    def send(
        self,
        now: float,
        num_bytes: int,
        rows: int,
        drafts: int,
        sequences: int,
        *,
        step_s: float,
        has_backlog: bool = False,
    ) -> Message:
        """Return a message sent now, with the time until which requests wait for its drafts; `step_s` as in
        `patience_s`."""
        self._num_sent += 1
        if has_backlog:
            self.backlog.count_sent(now, self._num_sent)
        wait_until = now + self.patience_s(drafts, step_s)
        return Message(self._num_sent, now, num_bytes, rows, drafts, sequences, wait_until, has_backlog)

    def take_answer(self, message: Message, received: float, step_s: float) -> None:
        """Update the expected answer time; `step_s` as in `patience_s`."""
        seconds = received - message.sent
        if message.sequences > 0:
            if math.isnan(self._answer_s):
                self._answer_s, self._deviation_s = seconds, seconds / 2
            self._deviation_s += SMOOTH_DEVIATION * (abs(seconds - self._answer_s) - self._deviation_s)
            self._answer_s += SMOOTH * (seconds - self._answer_s)
        self.backlog.note_answer(message.number)
        if message.has_backlog:
            # NaN, and so never late, while either is unknown. A message without drafts delays no drafts, and the last
            # answer with drafts may come from a time with a faster link.
            in_time_s = self._answer_s + step_s if message.sequences > 0 else math.nan
            self.backlog.learn(message.num_bytes, seconds, in_time_s)

    def describe(self, step_s: float) -> DraftPlan | None:
        """Return the plan and its measurements, None before the first answer; thread-safe."""
        if math.isnan(self._answer_s):
            return None
        without, *speeds = self.policy.speeds()
        best = max(speeds)
        return DraftPlan(
            num_drafts=0 if self.is_off else self.num_drafts,
            expected_gain=best / without if without > 0.0 else 0.0,
            best_num_drafts=1 + speeds.index(best),
            step_s=step_s,
            answer_s=self._answer_s,
            tokens_per_s=[without, *speeds],
        )
