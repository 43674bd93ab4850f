"""What throughput is measured of: accepted drafts, seconds of rounds, and forward passes timed at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Acceptance of the first position before any draft was verified, and for how many drafts that assumption counts. A
# position that was never reached starts at the rate of the position before it.
FIRST_RATE = 0.7
PRIOR_DRAFTS = 4.0
# A verify step counts half after this many further verify steps of the drafter's sequences.
HALF_LIFE_STEPS = 512
# Weights grow instead of old counts being scaled; beyond this weight all counts are scaled back.
MOST_WEIGHT = 1e9
# Rounds that an arm's throughput is averaged over.
MEMORY_ROUNDS = 16


class Profile:
    """Seconds of decoding passes by their number of rows, measured when the engine starts; empty on a CPU."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        measured = sorted((seconds or {}).items())
        self._rows = [rows for rows, _ in measured]
        self._seconds = np.maximum.accumulate([taken for _, taken in measured]) if measured else np.empty(0)

    def seconds(self, rows: int) -> float | None:
        """Return the seconds of a pass of `rows` rows; None if no pass was measured."""
        return float(np.interp(rows, self._rows, self._seconds)) if self._rows else None


class Acceptance:
    """Rates at which one drafter's drafts are accepted, given that the drafts before them were accepted."""

    def __init__(self, max_drafts: int) -> None:
        self._tested = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts
        self._weight = 1.0  # of the next verify step
        self._growth = 2 ** (1 / HALF_LIFE_STEPS)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count one sequence's verify step: the first `num_accepted` of its drafts were accepted."""
        self._weight *= self._growth
        for position in range(num_accepted):
            self._tested[position] += self._weight
            self._accepted[position] += self._weight
        if num_accepted < num_drafts:
            self._tested[num_accepted] += self._weight
        if self._weight > MOST_WEIGHT:
            self._tested = [tested / self._weight for tested in self._tested]
            self._accepted = [accepted / self._weight for accepted in self._accepted]
            self._weight = 1.0

    def expected_tokens(self) -> list[float]:
        """Return the expected tokens of a verify step with 0, 1, .. drafts, [max_drafts + 1]."""
        rate, reached, tokens = FIRST_RATE, 1.0, [1.0]
        prior = PRIOR_DRAFTS * self._weight
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            rate = (accepted + prior * rate) / (tested + prior)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


@dataclass
class Arm:
    """Throughput of one number of drafts at one load: sums over its last rounds.

    Verify steps and seconds are kept apart from acceptance, which is measured over all arms: the seconds of a few
    rounds tell enough.
    """

    rounds: int = 0
    drafted: float = 0.0  # verify steps of the drafter's sequences that had drafts
    other_tokens: float = 0.0  # expected tokens of everything else
    request_s: float = 0.0  # seconds times decoding requests

    def add(self, drafted: float, other_tokens: float, request_s: float) -> None:
        """Add one round."""
        keep = 1 - 1 / MEMORY_ROUNDS if self.rounds >= MEMORY_ROUNDS else 1.0
        self.rounds += 1
        self.drafted = keep * self.drafted + drafted
        self.other_tokens = keep * self.other_tokens + other_tokens
        self.request_s = keep * self.request_s + request_s

    def speed(self, expected_tokens: float) -> float:
        """Return tokens per second of one request, where a verify step with drafts emits `expected_tokens`."""
        tokens = self.drafted * expected_tokens + self.other_tokens
        return tokens / self.request_s if self.request_s > 0.0 else 0.0
