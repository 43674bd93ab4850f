"""The time of a decoding pass by its rows: measured when the engine starts, corrected by the steps that run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Half-life of the correction, in steps.
HALF_LIFE_STEPS = 64
# Regularizes the slope of the correction: rows are assumed to vary by at least this share of their mean.
LEAST_SPREAD = 0.25


class Sizes(NamedTuple):
    """The possible numbers of rows of a pass, ascending, and their times."""

    rows: np.ndarray  # [N] int64, including padding
    seconds: np.ndarray  # [N], monotonically increasing


class Profile:
    """Seconds of decoding passes by (sequences, rows) of their graph, measured at start; empty on a CPU."""

    def __init__(self, seconds: Mapping[tuple[int, int], float] | None = None) -> None:
        by_count: dict[int, list[tuple[int, float]]] = {}
        for (sequences, rows), taken in sorted((seconds or {}).items()):
            by_count.setdefault(sequences, []).append((rows, taken))
        self._counts = sorted(by_count)
        self._sizes = [
            Sizes(np.array([rows for rows, _ in own]), np.maximum.accumulate([taken for _, taken in own]))
            for own in (by_count[count] for count in self._counts)
        ]

    def sizes(self, sequences: int) -> Sizes | None:
        """Return the sizes of passes with this number of sequences; None if no such pass was measured."""
        place = bisect_left(self._counts, sequences)
        return None if place == len(self._counts) else self._sizes[place]

    def seconds(self, sequences: int, rows: int) -> float | None:
        """Return the seconds of a pass with this number of rows; None if no such pass was measured."""
        sizes = self.sizes(sequences)
        if sizes is None:
            return None
        return float(sizes.seconds[min(int(np.searchsorted(sizes.rows, rows)), len(sizes.rows) - 1)])


class StepCosts:
    """Seconds of a pass: the profile's, plus a correction that is linear in the rows.

    The correction covers what the profile lacks: attention over the contexts, and sampling. Without a profile, as on a
    CPU, the cost of other numbers of rows is unknown, because most steps have the same number.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sums = np.zeros(5)  # of 1, x, x^2, y, x y; x rows, y seconds beyond the profile
        self._keep = 0.5 ** (1 / HALF_LIFE_STEPS)

    def count(self, sequences: int, rows: int, seconds: float) -> None:
        """Update the correction from a step without prompts."""
        beyond = seconds - (self._profile.seconds(sequences, rows) or 0.0)
        self._sums = self._keep * self._sums + np.array([1.0, rows, rows * rows, beyond, rows * beyond])

    @property
    def is_known(self) -> bool:
        """Return whether passes were measured at start."""
        return self._profile.sizes(1) is not None

    def seconds(self, sequences: int, rows: int) -> float:
        """Return the expected seconds of a pass; 0 before the first step without a profile."""
        at, slope = self._correction()
        return max(0.0, (self._profile.seconds(sequences, rows) or 0.0) + at + slope * rows)

    def sizes(self, sequences: int, most_rows: int) -> Sizes:
        """Return the measured sizes of a pass with this number of sequences, up to the first with at least `most_rows`
        rows; empty if none was measured."""
        measured = self._profile.sizes(sequences) or Sizes(np.zeros(0, np.int64), np.zeros(0))
        end = min(int(np.searchsorted(measured.rows, most_rows)) + 1, len(measured.rows))
        rows, seconds = measured.rows[:end], measured.seconds[:end]
        at, slope = self._correction()
        return Sizes(rows, np.maximum.accumulate((seconds + at + slope * rows).clip(0.0)))

    def _correction(self) -> tuple[float, float]:
        count, x, xx, y, xy = self._sums.tolist()
        if count == 0.0:
            return 0.0, 0.0
        mean = x / count
        spread = xx / count - mean * mean + (LEAST_SPREAD * mean) ** 2
        slope = (xy / count - mean * y / count) / spread if spread > 0.0 else 0.0
        slope = max(slope, 0.0)
        return y / count - slope * mean, slope
