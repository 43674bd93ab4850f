"""A cost that is linear in what causes it, measured while serving and followed as it changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

# An observation further off than so many standard deviations is pulled in to that; so many of them in a row, all on the
# same side, are a change instead and believed at once.
OUTLIER_DEVIATIONS = 3.0
CHANGE_AFTER = 3
# The noise of an observation: what is assumed of the first, what is believed at least, the weight of a new one among
# many, and after how long what was seen of it counts half where there are few. It is what successive observations
# differ by: what all of them are off by is no noise but a line that has moved.
FIRST_NOISE = 0.2
LEAST_NOISE = 0.01
NOISE_WEIGHT = 0.05
NOISE_HALF_LIFE_S = 0.3
# A coefficient near 0 moves as one of this share of the most that it could be.
FLOOR = 0.02
# Among the first few observations: where one takes less than this share of what those before it say, they were of a
# cold start, and are forgotten.
FIRST_FEW = 8
COLD_SHARE = 0.25
# What the clock cannot tell from nothing.
CLOCK_S = 1e-6


class LinearEstimate:
    """Seconds = sum of coefficients times causes: a Kalman filter whose coefficients walk at random.

    What the observations do not tell apart keeps its last value and grows uncertain with time, so that a coefficient
    learnt at one load is there when the load comes back. Coefficients are costs, hence never negative.
    """

    def __init__(self, shares: Sequence[float], drift: float) -> None:
        """
        Parameters
        ----------
        shares
            [d], adding up to at most 1: how the first observation is split among the causes.
        drift
            How far a coefficient may move in a second, as a share of its size.
        """
        self._shares = tuple(shares)
        self._drift_share = drift
        self._begin()

    def _begin(self) -> None:
        num_causes = len(self._shares)
        self.count = 0
        self.weights = [0.0] * num_causes
        self._spread = [0.0] * num_causes  # of each coefficient, when nothing is known of it
        self._covariance = [[0.0] * num_causes for _ in range(num_causes)]
        self._variance = 0.0  # of an observation around the line
        self._size = 0.0  # of an observation
        self._now = 0.0
        self._strays = 0  # outliers in a row, negative when they are below
        self._left = 0.0  # of the last observation, when the line had moved

    @property
    def noise(self) -> float:
        """Standard deviation of one observation around the line, seconds."""
        return math.sqrt(self._variance)

    def predict(self, causes: Sequence[float]) -> float:
        """Expected seconds; 0 before the first observation."""
        return sum(w * x for w, x in zip(self.weights, causes, strict=True))

    def has_seen(self, causes: Sequence[float]) -> bool:
        """Whether all causes that are above 0 have been observed."""
        return all(cause <= 0.0 or spread > 0.0 for cause, spread in zip(causes, self._spread, strict=True))

    def uncertainty(self, causes: Sequence[float]) -> float:
        """Standard deviation of what `predict` says, seconds; infinite before the first observation."""
        if self.count == 0:
            return math.inf
        return math.sqrt(max(0.0, self._gains(causes)[1]))

    def observe(self, causes: Sequence[float], seconds: float, now: float) -> None:
        """Takes one observation, made at the monotonic time `now`.

        Parameters
        ----------
        causes
            [d], none negative, not all 0.
        """
        seconds = max(seconds, CLOCK_S)
        if self.count < FIRST_FEW and seconds < COLD_SHARE * self.predict(causes):
            self._begin()
        if self.count == 0:
            self._variance, self._size = (FIRST_NOISE * seconds) ** 2, seconds
        elapsed = now - self._now if self.count else 0.0
        self._reveal(causes, seconds)
        self._drift(now)
        self._correct(causes, seconds, elapsed)
        self.count += 1

    def _reveal(self, causes: Sequence[float], seconds: float) -> None:
        """Gives a cause that is seen for the first time its share of what it was seen with."""
        for i, (cause, share) in enumerate(zip(causes, self._shares, strict=True)):
            if cause > 0 and self._spread[i] == 0.0:
                self.weights[i] = share * seconds / cause if self.count == 0 else 0.0
                self._spread[i] = max(seconds, self._size * 0.1) / cause
                self._covariance[i][i] = self._spread[i] ** 2

    def _drift(self, now: float) -> None:
        elapsed = now - self._now if self.count else 0.0
        self._spread[0] = max(self._spread[0], self._size)  # what is always there may be all of an observation
        self._now = now
        for i, (weight, spread) in enumerate(zip(self.weights, self._spread, strict=True)):
            own = self._covariance[i]
            step = self._drift_share * max(weight, FLOOR * spread)
            own[i] += min(step**2 * elapsed, max(0.0, spread**2 - own[i]))

    def _correct(self, causes: Sequence[float], seconds: float, elapsed: float) -> None:
        gains, explained = self._gains(causes)
        residual = seconds - self.predict(causes)
        limit = OUTLIER_DEVIATIONS * math.sqrt(explained + self._variance)
        if abs(residual) <= limit:
            self._strays = 0
        elif self._is_change(residual):
            self._loosen(causes, residual)
            gains, explained = self._gains(causes)
        else:
            residual = math.copysign(limit, residual)
        total = explained + self._variance
        for i, (row, gain) in enumerate(zip(self._covariance, gains, strict=True)):
            self.weights[i] += gain / total * residual
            for j, other in enumerate(gains):
                row[j] -= gain * other / total
        self._project()
        weight = max(NOISE_WEIGHT, 1 / (self.count + 2), 1.0 - 0.5 ** (elapsed / NOISE_HALF_LIFE_S))
        self._size += weight * (seconds - self._size)
        left = residual * self._variance / total
        around = (left - self._left) ** 2 / 2 if self.count else left**2
        self._left = left
        self._variance += weight * (around - self._variance)
        self._variance = max(self._variance, (LEAST_NOISE * self._size) ** 2)

    def _loosen(self, causes: Sequence[float], residual: float) -> None:
        """Makes room for a change. What is nearly always there has changed; whether it was another cause shows when the
        load does. Where it is not there, or would have to cost less than nothing, all causes that are there may have.
        """
        if causes[0] > 0 and residual >= -self.weights[0] * causes[0]:
            self._covariance[0][0] += residual**2
            return
        for i, (weight, cause) in enumerate(zip(self.weights, causes, strict=True)):
            if cause > 0:
                self._covariance[i][i] += max(weight, residual / cause) ** 2

    def _project(self) -> None:
        """Sets negative coefficients to 0 and moves those that they trade off with to match."""
        for i, own in enumerate(self._covariance):
            missing = -self.weights[i]
            if missing > 0 and own[i] > 0:
                self.weights = [w + c / own[i] * missing for w, c in zip(self.weights, own, strict=True)]
        self.weights = [max(0.0, weight) for weight in self.weights]

    def _gains(self, causes: Sequence[float]) -> tuple[list[float], float]:
        """Covariance times causes, and the variance of the prediction."""
        gains = [sum(c * x for c, x in zip(row, causes, strict=True)) for row in self._covariance]
        return gains, sum(x * g for x, g in zip(causes, gains, strict=True))

    def _is_change(self, residual: float) -> bool:
        """Counts an outlier; whether it is one of so many that it is none."""
        self._strays = max(self._strays, 0) + 1 if residual > 0 else min(self._strays, 0) - 1
        if abs(self._strays) < CHANGE_AFTER:
            return False
        self._strays = 0
        return True
