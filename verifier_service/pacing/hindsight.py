"""What became of a forecast: the share of its tokens that came, which tells of costs that nothing else knows of.

And what was made at all, while sequences lack rows at a drafter too: no plan forecasts that, but the loss counts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from verifier_service.pacing.plan import MAX_GROUPS, Load, Plan

# Windows, from one plan to the next, that tell: the median of so many at most, and nothing before there are so few.
MOST_WINDOWS = 9
LEAST_WINDOWS = 3
# What is known of plans that are not in use comes half as near to what the one in use shows in so long: costs that they
# have in common change for all, and what spoke against a plan alone is tried again.
HALF_LIFE_S = 30.0
# A window counts only if no more than this share of the sequences has come or gone in it, or is behind at the drafter.
STEADY = 0.1
# A single step that stalled is no better known for having stalled for long.
SHARES = (0.25, 2.0)
# The load's scale stays until it is left by so much.
SAME_SCALE = 1.5


def scale_of(sequences: int, before: int = 0) -> int:
    """The scale of a load: binary digits of the number of sequences, but the scale `before` while it is hardly left."""
    lowest, highest = 2 ** max(before - 1, 0), 2**before - 1
    return before if lowest / SAME_SCALE <= sequences <= highest * SAME_SCALE else sequences.bit_length()


class Output(NamedTuple):
    """What steps without prompts have brought so far, and how long they took, with all that was waited for between."""

    # Verify steps of sequences, by the address of their drafter and their number of drafts; "" for those without.
    verified: Mapping[tuple[str, int], int] = MappingProxyType({})
    steps: int = 0
    seconds: float = 0.0

    def tokens_since(self, before: Output, expected: Mapping[str, Sequence[float]]) -> float:
        """Expected tokens of what came since then; `expected` are those of a verify step of 0, 1, .. drafts, by
        drafter."""
        tokens = 0.0
        for (drafter, drafts), count in self.verified.items():
            known = expected.get(drafter, (1.0,))
            tokens += (count - before.verified.get((drafter, drafts), 0)) * known[min(drafts, len(known) - 1)]
        return tokens


class Made(NamedTuple):
    """What steps without prompts have brought from one plan to the next."""

    tokens: float  # expected of what was verified
    seconds: float  # that these steps took


class Hindsight:
    """Learns by which share plans fall short of their forecasts: one for each number of groups, and one for no drafts.

    What is compared are expected tokens: those of the verify steps that there were, by the drafts that each had, over
    those of the verify steps that there should have been. So luck with drafts is no part of it, and neither is what
    is learnt of their acceptance. It is learnt for each scale of the load (`scale_of`): costs that many sequences have
    say little of one alone; and apart while other drafters are asked for drafts, whose sequences share the steps.

    Attributes
    ----------
    scale
        Of the load, 0 before the first.
    shares
        Of what is forecast without drafts, and with drafts in 1, 2, .. groups, [1 + MAX_GROUPS], at this scale.
    """

    def __init__(self) -> None:
        self.scale = 0
        self.shares = [1.0] * (1 + MAX_GROUPS)
        self._has_learnt = False  # at this scale, since it came to be
        self._is_alone = True
        # By scale and whether this drafter was alone: shares that were learnt, and until when.
        self._known: dict[tuple[int, bool], tuple[list[float], float]] = {}
        self._windows: deque[float] = deque(maxlen=MOST_WINDOWS)  # of the plan in use, since it was taken up
        self._before = Output()
        self._plan: Plan | None = None
        self._sequences = self._behind = 0
        self._others = 0.0
        self._first_step = 0  # that the plan in use has made what it is
        self._now = 0.0

    def pause(self) -> None:
        """Nothing is forecast: what comes from now on is no window of the plan."""
        self._plan = None

    def turn_to(self, scale: int, now: float, *, is_alone: bool = True) -> None:
        """Takes what follows for a load of that scale, and for no others being asked for drafts or for some.

        Its shares are those that were learnt last so, or else at the scale next to it, but nearer to 1: the roots for
        each half-life since then, and for each scale between. Where nothing was learnt so, they are 1.
        """
        if (scale, is_alone) == (self.scale, self._is_alone):
            return
        if self._has_learnt:
            self._known[self.scale, self._is_alone] = self.shares, now
        known = {other: entry for (other, was_alone), entry in self._known.items() if was_alone == is_alone}
        if known:
            nearest = min(known, key=lambda other: (abs(other - scale), -known[other][1]))
            shares, until = known[nearest]
            power = 0.5 ** (abs(nearest - scale) + (now - until) / HALF_LIFE_S)
            self.shares = [share**power for share in shares]
        elif is_alone != self._is_alone:
            self.shares = [1.0] * (1 + MAX_GROUPS)
        self.scale, self._is_alone, self._has_learnt, self._now = scale, is_alone, False, now
        self.pause()

    def take(
        self,
        now: float,
        plan: Plan,
        load: Load,
        rate: float,
        output: Output,
        expected: Mapping[str, Sequence[float]],
    ) -> Made | None:
        """Takes a window: what came since the last call, and says what that was; None where nothing was forecast, or
        more than a few sequences have come or gone. For the shares it counts if all of it came under `plan`.

        Parameters
        ----------
        rate
            Tokens per second that were forecast, as they would be without hindsight.
        output
            Of all steps so far.
        expected
            Tokens of a verify step of 0, 1, .. drafts, by drafter.
        """
        before, self._before = self._before, output
        come, self._sequences = abs(load.sequences - self._sequences), load.sequences
        num_others = (load.decoding or load.small_step) - load.sequences
        others, self._others = abs(num_others - self._others), num_others
        behind, self._behind = max(load.behind, self._behind), load.behind
        self._fade(now, plan)
        made = None
        if self._plan is not None and max(come, others) <= STEADY * load.sequences:
            made = Made(output.tokens_since(before, expected), output.seconds - before.seconds)
        if self._plan != plan:
            turns = plan.turns if self._plan is None else max(plan.turns, self._plan.turns)
            if self._plan is None or self._plan.turns != plan.turns:
                self._windows.clear()
            # Steps on their way are of the plan before, and one that has landed is not counted yet.
            self._plan, self._first_step = plan, output.steps + 1 + max(turns, 1)
            return made
        # Where this drafter is asked for nothing and others are, less came for them.
        is_own = plan.turns > 0 or not load.decoding
        if made is not None and is_own and before.steps >= self._first_step and behind <= STEADY * load.sequences:
            self._learn(plan, made, rate)
        return made

    def _learn(self, plan: Plan, made: Made, rate: float) -> None:
        if made.seconds <= 0.0 or rate <= 0.0:
            return
        self._windows.append(min(max(made.tokens / made.seconds / rate, SHARES[0]), SHARES[1]))
        if len(self._windows) >= LEAST_WINDOWS:
            self.shares[plan.turns] = statistics.median(self._windows)
            self._has_learnt = True

    def _fade(self, now: float, plan: Plan) -> None:
        part = 1.0 - 0.5 ** ((now - self._now) / HALF_LIFE_S)
        self._now = now
        current = self.shares[plan.turns]
        self.shares = [share + part * (current - share) for share in self.shares]
