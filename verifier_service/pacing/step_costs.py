"""What a decoding pass takes by its rows: measured when the engine starts, corrected by the steps that run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# A step counts half after so many further ones.
HALF_LIFE_STEPS = 64
# The slope of the correction is that of rows that differ by this share of their mean, at least: rows that hardly differ
# say nothing of it.
LEAST_SPREAD = 0.25


class Sizes(NamedTuple):
    """Numbers of rows that a pass can have, ascending, and what each takes."""

    rows: np.ndarray  # [N] int64, padding included
    seconds: np.ndarray  # [N], not falling


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
        """Return the sizes of passes of that many sequences; None if no such pass was measured."""
        place = bisect_left(self._counts, sequences)
        return None if place == len(self._counts) else self._sizes[place]

    def seconds(self, sequences: int, rows: int) -> float | None:
        """Return the seconds of a pass with so many rows; None if no such pass was measured."""
        sizes = self.sizes(sequences)
        if sizes is None:
            return None
        return float(sizes.seconds[min(int(np.searchsorted(sizes.rows, rows)), len(sizes.rows) - 1)])


class StepCosts:
    """Seconds of a pass: those of the profile, and a correction that is linear in the rows.

    The correction has what the profile lacks: attention over the contexts, and the draw. Without a profile, as on a
    CPU, the steps that ran do not say what others would take: they mostly have as many rows.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sums = np.zeros(5)  # of 1, x, x^2, y, x y; x rows, y seconds beyond the profile
        self._keep = 0.5 ** (1 / HALF_LIFE_STEPS)

    def count(self, sequences: int, rows: int, seconds: float) -> None:
        """Learn from a step without prompts."""
        beyond = seconds - (self._profile.seconds(sequences, rows) or 0.0)
        self._sums = self._keep * self._sums + np.array([1.0, rows, rows * rows, beyond, rows * beyond])

    @property
    def is_known(self) -> bool:
        """Return whether passes were measured at start."""
        return self._profile.sizes(1) is not None

    def seconds(self, sequences: int, rows: int) -> float:
        """Return the expected seconds of a pass; 0 while nothing is known."""
        at, slope = self._correction()
        return max(0.0, (self._profile.seconds(sequences, rows) or 0.0) + at + slope * rows)

    def sizes(self, sequences: int, most_rows: int) -> Sizes:
        """Return the measured sizes that a pass of so many sequences can have, up to the one that `most_rows` fit into;
        none where there is no such size."""
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
