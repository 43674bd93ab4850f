"""How many drafts pay, and in how many groups their sequences take turns: expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier_service.pacing.costs import DrafterCost, TargetCost

# Most groups that take turns.
MAX_GROUPS = 4


@dataclass(frozen=True)
class Load:
    """What runs: the sequences of one drafter, and those that share the target's steps with them."""

    sequences: int
    row_bytes: int
    other_rows: float = 0.0  # of a step
    other_tokens: float = 0.0
    behind: int = 0  # sequences of all drafters that lack rows there, and draft once they are there
    running: int = 0  # requests in all, those with prompts too, which no plan changes
    asks_nothing: bool = False  # whether the sequences are asked for no drafts yet, whatever the plan
    decoding: int = 0  # sequences in all that decode, where other drafters are asked for drafts too
    # What of other_rows and other_tokens is of drafters with one group, whose sequences wait for drafts like these.
    joint_rows: float = 0.0
    joint_tokens: float = 0.0

    @property
    def small_step(self) -> float:
        """Rows of a step without drafts."""
        return self.sequences + self.other_rows


@dataclass(frozen=True)
class Plan:
    """Drafts of each sequence, and into how many groups the sequences part; no drafts are one group."""

    num_drafts: int
    num_groups: int = 1

    @property
    def turns(self) -> int:
        """Groups that take turns in drafting: 0 where none drafts."""
        return self.num_groups if self.num_drafts else 0


OFF = Plan(0)


class Forecast:
    """Tokens per second of every plan.

    With k drafts and J groups a sequence is in every J-th step. While its drafts are made, the J - 1 steps of the other
    groups run; what they do not hide is waited for, and so is what the host does between. Neither the drafter nor the
    link works on two groups at once, so that a round is never shorter than the time of either for all groups.

    Sequences of other drafters that have one group are in each step where these are one group too, and all wait for
    their drafts together; where these take turns, steps do not wait, and those are in every second one.

    Attributes
    ----------
    without
        Tokens per second without drafts of these sequences.
    without_any
        Tokens per second if nobody drafted, where `is_alone` the same.
    is_alone
        Whether no other drafter is asked for drafts.
    step_s
        Seconds of a step without.
    lead_seen
        See `TargetCost`.
    """

    def __init__(
        self,
        load: Load,
        tokens: Sequence[float],
        target: TargetCost,
        drafter: DrafterCost,
        deadline_s: float = math.inf,
        shares: Sequence[float] = (1.0,) * (1 + MAX_GROUPS),
    ) -> None:
        """
        Parameters
        ----------
        tokens
            [k + 1], expected of a verify step of 0, 1, .. k drafts.
        deadline_s
            How long drafts are waited for; a plan that needs longer gets none.
        shares
            [1 + MAX_GROUPS], of what the costs say, that came without drafts and with those of 1, 2, .. groups.
        """
        self.lead_seen = target.lead_seen
        count = load.sequences
        undrafted = count + load.other_rows
        self.step_s = (target.seconds(undrafted) + target.beside_s) / shares[0]
        self.without = (count + load.other_tokens) / self.step_s
        self.is_alone = load.decoding == 0
        self.without_any = self.without
        if not self.is_alone:
            self.without_any = load.decoding / (target.seconds(load.decoding) + target.beside_s) * shares[0]
        drafts = np.arange(1, len(tokens))  # [k]
        emitted = count * np.asarray(tokens[1:])  # [k], by all groups
        most = MAX_GROUPS if load.other_rows else min(MAX_GROUPS, count)
        groups = np.arange(1, most + 1)[:, None]  # [J, 1]
        missed = np.where(groups > 1, 0.5, 0.0)  # [J, 1]
        other_rows = load.other_rows - missed * load.joint_rows
        other_tokens = load.other_tokens - missed * load.joint_tokens
        rows = count * (drafts + 1) / groups + other_rows
        step = target.seconds(rows) + target.per_feature_row * emitted / groups
        step += np.where(groups > 1, target.turn_s, 0.0)
        trip, per_byte = drafter.link
        per_answer, per_position, per_draft, per_drafter_row = drafter.compute
        compute = per_answer + per_position * drafts + (per_draft * drafts * count + per_drafter_row * emitted) / groups
        compute += np.where((groups > 1) | (load.other_rows > 0), drafter.beside_s, 0.0)
        wire = per_byte * load.row_bytes * emitted / groups
        latency = trip + wire + compute
        round_s = groups * step + np.maximum(0.0, latency + target.lead_s - (groups - 1) * step)
        round_s = np.maximum(round_s, groups * np.maximum(compute, wire))
        rates = (emitted + groups * other_tokens) / round_s * np.asarray(shares)[groups]
        self._rates = np.where(latency <= deadline_s, rates, 0.0)  # [J, k]
        self._trip, self._wire, self._compute = trip, wire, compute  # the latter two [J, k]

    def rate(self, plan: Plan) -> float:
        """Tokens per second of a plan; 0 for one that is not open to this load."""
        if plan.num_drafts == 0:
            return self.without
        most_groups, most_drafts = self._rates.shape
        if plan.num_groups > most_groups or plan.num_drafts > most_drafts:
            return 0.0
        return float(self._rates[plan.num_groups - 1, plan.num_drafts - 1])

    @property
    def gain(self) -> float:
        """Tokens per second of the fastest plan with drafts over those without."""
        return self.rate(self.best()) / self.without

    def answer_s(self, plan: Plan) -> tuple[float, float, float]:
        """Seconds from a message to its answer, for a plan with drafts: the way, the features' bytes, the drafting."""
        place = plan.num_groups - 1, plan.num_drafts - 1
        return self._trip, float(self._wire[place]), float(self._compute[place])

    def best(self, num_drafts: int | None = None) -> Plan:
        """The fastest plan with drafts, of `num_drafts` if that is given."""
        rates = self._rates if num_drafts is None else self._rates[:, num_drafts - 1 : num_drafts]
        group, column = np.unravel_index(int(rates.argmax()), rates.shape)
        return Plan(int(column) + 1 if num_drafts is None else num_drafts, int(group) + 1)
