"""What became of a forecast: the share of its tokens that came, which tells of costs that nothing else knows of."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from verifier_service.pacing.plan import MAX_GROUPS, Plan

# Windows, from one plan to the next, that tell: the median of so many at most, and nothing before there are so few.
MOST_WINDOWS = 9
LEAST_WINDOWS = 3
# A plan that is not in use is believed to be what its forecast says after so long, so that it is tried again.
FORGET_S = 10.0
# A window counts only if no more than this share of the sequences has come or gone in it.
STEADY = 0.1
# A single step that stalled is no better known for having stalled for long.
SHARES = (0.25, 2.0)


class Output(NamedTuple):
    """What steps without prompts have brought so far, and how long they took, with all that was waited for between."""

    verified: Mapping[int, int] = MappingProxyType({})  # verify steps of sequences, by their number of drafts
    seconds: float = 0.0


class Hindsight:
    """Learns by which share plans fall short of their forecasts: one for each number of groups, and one for no drafts.

    What is compared are expected tokens: those of the verify steps that there were, by the drafts that each had, over
    those of the verify steps that there should have been. So luck with drafts is no part of it, and neither is what
    is learnt of their acceptance.
    """

    def __init__(self) -> None:
        self._windows: defaultdict[int, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=MOST_WINDOWS)
        )  # (monotonic time, share) by the number of groups, 0 for no drafts
        self._before = Output()
        self._plan: Plan | None = None
        self._sequences = 0

    def take(
        self, now: float, plan: Plan, sequences: int, rate: float, tokens: Sequence[float], output: Output
    ) -> None:
        """Takes a window: what came since the last call, all of it under `plan`.

        Parameters
        ----------
        rate
            Tokens per second that were forecast, as they would be without hindsight.
        tokens
            Expected of a verify step of 0, 1, .. drafts.
        output
            Of all steps so far.
        """
        # Those that were on their way when a plan was taken up are still of the one before it.
        is_steady = plan == self._plan and abs(sequences - self._sequences) <= STEADY * sequences
        before, self._before, self._plan, self._sequences = self._before, output, plan, sequences
        seconds = output.seconds - before.seconds
        if not is_steady or seconds <= 0.0 or rate <= 0.0:
            return
        most = len(tokens) - 1  # another drafter may give more drafts
        came = sum(
            (steps - before.verified.get(drafts, 0)) * tokens[min(drafts, most)]
            for drafts, steps in output.verified.items()
        )
        share = min(max(came / seconds / rate, SHARES[0]), SHARES[1])
        self._windows[plan.turns].append((now, share))

    def shares(self, now: float) -> list[float]:
        """Of what is forecast without drafts, and with drafts in 1, 2, .. groups, [1 + MAX_GROUPS]."""
        return [self._share(groups, now) for groups in range(1 + MAX_GROUPS)]

    def _share(self, groups: int, now: float) -> float:
        seen = [share for time, share in self._windows[groups] if time > now - FORGET_S]
        return statistics.median(seen) if len(seen) >= LEAST_WINDOWS else 1.0
