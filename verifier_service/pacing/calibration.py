"""The acceptance probability of drafts: a drafter's confidences, calibrated by the acceptance of its earlier drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Assumed confidence of a draft without one.
NO_CONFIDENCE = 0.7
# Confidences are clipped to [LEAST_CONFIDENCE, 1 - LEAST_CONFIDENCE].
LEAST_CONFIDENCE = 1e-3
# Weight of the prior, which trusts the confidence, in drafts: for offset and slope.
PRIOR_DRAFTS = np.array([4.0, 16.0])
# Variance of a draft's acceptance assumed by the prior.
VARIANCE = 0.25
# Half-life of the regression, in verify steps of the drafter's sequences.
HALF_LIFE_STEPS = 512
LARGEST_SLOPE = 4.0
# Half-life of the tokens per draft, which depend on load and budget; weight of the prior that all drafts are verified,
# in verify steps of sequences.
BROUGHT_HALF_LIFE_STEPS, PRIOR_SEQUENCES = 128, 4.0


class Calibration:
    """The probability that one drafter's draft is accepted, given that the drafts before it in its step are.

    It is a logistic regression for each position of the step: sigmoid(offset + slope * logit(confidence)), fitted
    online by Newton steps over discounted counts. It starts with offset 0 and slope 1, the confidence itself, and
    decays to these while no draft of the position is tested, as in vLLM's estimator for heads without confidences (PR
    52228).
    """

    def __init__(self, max_drafts: int, rates: Sequence[float] | None = None) -> None:
        """`rates`: known mean acceptance rates of the positions, for synthetic acceptance, whose confidences are known
        to be right."""
        self._rates = None if rates is None else np.asarray(rates, np.float64)[:max_drafts]
        self._weights = np.tile([0.0, 1.0], (max_drafts, 1))  # offset and slope of each position
        self._precision = np.zeros((max_drafts, 2, 2))  # of the tested drafts
        self._offered = np.zeros(max_drafts)  # received drafts of each position, and their expected tokens
        self._brought = np.zeros(max_drafts)

    def acceptance(self, confidences: np.ndarray) -> np.ndarray:
        """Return the conditional acceptance probabilities for confidences, both [S, n]; NaN: no confidence."""
        num_drafts = confidences.shape[1]
        if self._rates is not None:
            return np.where(np.isnan(confidences), self._rates[:num_drafts], confidences)
        offset, slope = self._weights[:num_drafts].T
        return 1.0 / (1.0 + np.exp(-(offset + slope * _logit(confidences))))

    def survival(self, confidences: np.ndarray) -> np.ndarray:
        """Return the probabilities that each draft and all before it are accepted, [S, n], as for `acceptance`."""
        return np.cumprod(self.acceptance(confidences), axis=1)

    def count(self, confidences: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Update the regression from verify steps.

        Args:
            confidences: Confidences of the drafts, [S, n]; NaN: no confidence.
            num_drafts: Verified drafts of each sequence, [S].
            num_accepted: Accepted drafts of each sequence, [S].
        """
        if self._rates is not None or len(confidences) == 0:
            return
        n = confidences.shape[1]
        place = np.arange(n)
        is_accepted = place < num_accepted[:, None]
        is_tested = (place <= num_accepted[:, None]) & (place < num_drafts[:, None])
        x = _logit(confidences)
        p = self.acceptance(confidences)
        error, weight = np.where(is_tested, is_accepted - p, 0.0), np.where(is_tested, p * (1.0 - p), 0.0)
        gradient = np.stack([error.sum(0), (error * x).sum(0)], axis=1)
        cross = (weight * x).sum(0)
        found = np.stack([weight.sum(0), cross, cross, (weight * x * x).sum(0)], axis=1).reshape(n, 2, 2)
        keep = 0.5 ** (len(confidences) / HALF_LIFE_STEPS)
        self._precision *= keep
        self._precision[:n] += found
        prior = VARIANCE * PRIOR_DRAFTS
        pull = (1.0 - keep) * prior * (np.array([0.0, 1.0]) - self._weights)
        pull[:n] += gradient
        self._weights += np.linalg.solve(self._precision + np.diag(prior), pull[:, :, None])[:, :, 0]
        np.clip(self._weights[:, 1], 0.0, LARGEST_SLOPE, out=self._weights[:, 1])

    def count_brought(self, brought: np.ndarray, is_offered: np.ndarray) -> None:
        """Count received drafts [S, n] bool, and their expected tokens [S, n], 0 for drafts that were not verified."""
        n, keep = brought.shape[1], 0.5 ** (len(brought) / BROUGHT_HALF_LIFE_STEPS)
        self._offered *= keep
        self._brought *= keep
        self._offered[:n] += is_offered.sum(0)
        self._brought[:n] += brought.sum(0)

    def expected_tokens(self) -> list[float]:
        """Return the expected tokens of a verify step that received 0, 1, .. drafts, [max_drafts + 1]."""
        assumed = self.survival(np.full((1, len(self._weights)), np.nan))[0]
        brought = (self._brought + PRIOR_SEQUENCES * assumed) / (self._offered + PRIOR_SEQUENCES)
        return [1.0, *(1.0 + brought.cumsum()).tolist()]


def _logit(confidences: np.ndarray) -> np.ndarray:
    sure = np.where(np.isnan(confidences), NO_CONFIDENCE, confidences)
    sure = sure.clip(LEAST_CONFIDENCE, 1.0 - LEAST_CONFIDENCE)
    return np.asarray(np.log(sure / (1.0 - sure)))
