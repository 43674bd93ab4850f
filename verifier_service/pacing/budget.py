"""The verification budget: how many drafts of a step, over all its sequences, maximize the expected tokens per second.

More rows make a pass longer. The budget of a step is the number of draft rows, including 0, with the highest expected
throughput,

    (sequences + sum of the drafts' survival) / (seconds of the pass + seconds of a round besides the pass),

where a draft's survival is the probability that it and all drafts before it are accepted. Sources: DSpark (arXiv
2607.05147), vLLM PRs 47808 and 52228.

**Exactness.** With draft logits the choice to verify a draft must be independent of the draft's own value; otherwise
verified drafts do not have the distribution q (DSpark, appendix A). For drafts d_1 .. d_k of a sequence the confidence
c_j is a function of the committed tokens and d_1 .. d_{j-1}. So c_{j+1} depends on d_j, and the choice of d_j may
depend only on c_1 .. c_j. Three things could break that:

- *The order.* d_j is verified only if d_1 .. d_{j-1} are, and its survival is a product of c_1 .. c_j.
- *A threshold* computed from this step's survivals would depend on c_{j+1}. So `Limit`, the threshold and the number
  of rows, is computed from earlier steps alone. Rejected drafts of those steps are sampled again with other noise, so
  they are independent of d_j.
- *The shared rows.* A row for d_2 of one sequence is not available for d_1 of another. Requests with the same seed and
  prompt have equal drafts, so later confidences of one are a function of the other's d_j. So `chosen` assigns the rows
  position by position: the choice at position j depends only on confidences of positions up to j, in all sequences.

Then the number of verified drafts is a stopping time of d_1, d_2, ..., and standard and block verification are exact
at each node of the tree of drafts. One-hot verification and `coupled` are exact for any choice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from verifier_service.pacing.step_costs import Profile, StepCosts

# The distribution of survival: bins of equal width in its logarithm, from 1 down; the last includes all lower values.
NUM_BINS, LEAST_SURVIVAL = 64, 2.0**-8
# Half-life of the distribution, in sequence steps (one step of one sequence).
HALF_LIFE_SEQUENCES = 1024
# All drafts are verified before this many sequence steps.
ENOUGH_SEQUENCES = 64
# Smoothing of the seconds of a round besides its pass, and the rounds needed before they are used.
SMOOTH, ENOUGH_ROUNDS = 1 / 16, 6
# Verifying fewer than all drafts must be faster by this factor.
BETTER_BY = 1.01


class Limit(NamedTuple):
    """Bounds on the drafts that a step verifies, computed before the drafts exist."""

    least_survival: float
    most_drafts: int  # sum over all sequences


def chosen(survival: np.ndarray, limit: Limit) -> np.ndarray:
    """Return the number of drafts to verify for each sequence, int64 [S].

    Args:
        survival: Survival of each draft, [S, k]; 0 for missing drafts.
        limit: If its rows do not suffice for all drafts of a position, those with the highest survival are verified.
    """
    count = np.zeros(len(survival), np.int64)
    going = np.arange(len(survival))  # sequences all of whose drafts so far are verified
    room = limit.most_drafts
    for own in survival.T:
        going = going[(own[going] >= limit.least_survival) & (own[going] > 0.0)]
        if len(going) > room:
            going = going[np.argsort(-own[going], kind="stable")[:room]]
        if len(going) == 0:
            break
        count[going] += 1
        room -= len(going)
    return count


class VerificationBudget:
    """Chooses the limit of each step of a verifier. Only the engine's thread uses it; metrics read `last_limit`.

    Attributes:
        costs: Seconds of passes.
        last_limit: Maximum draft rows of the last step; -1 if it had no limit.
    """

    def __init__(self, profile: Profile, *, is_adaptive: bool) -> None:
        """Unless `is_adaptive` all drafts are verified."""
        self.costs = StepCosts(profile)
        self.last_limit = -1
        self._is_adaptive = is_adaptive
        self._counts = np.zeros(NUM_BINS)  # number of drafts by survival
        self._mass = np.zeros(NUM_BINS)  # sum of their survival
        self._sequences = 0.0  # number of sequence steps with these drafts
        self._besides_s = math.nan  # seconds of a round with drafts besides its pass
        self._rounds = 0
        self._pinned: Limit | None = None

    def pin(self, limit: Limit) -> None:
        """Use this limit in each step from now on; for tests and measurements."""
        self._pinned = limit

    def count_offered(self, survival: np.ndarray) -> None:
        """Count the survival [S, k] of the drafts received for a launched step; 0 for missing drafts."""
        if not self._is_adaptive or len(survival) == 0:
            return
        keep = 0.5 ** (len(survival) / HALF_LIFE_SEQUENCES)
        values = survival[survival > 0.0]
        bins = (np.log(values) * ((NUM_BINS - 1) / math.log(LEAST_SURVIVAL))).astype(np.int64).clip(0, NUM_BINS - 1)
        self._counts = keep * self._counts + np.bincount(bins, minlength=NUM_BINS)
        self._mass = keep * self._mass + np.bincount(bins, values, minlength=NUM_BINS)
        self._sequences = keep * self._sequences + len(survival)

    def count_step(self, sequences: int, rows: int, pass_s: float, round_s: float, *, has_drafts: bool) -> None:
        """Count a step without prompts, whose tokens came `round_s` after those of the previous step."""
        self.costs.count(sequences, rows, pass_s)
        if has_drafts:
            besides_s = max(0.0, round_s - pass_s)
            self._rounds += 1
            is_first = math.isnan(self._besides_s)
            # A single stall of the host must not look like a large distance to the drafter.
            besides_s = besides_s if is_first else min(besides_s, 4.0 * (self._besides_s + pass_s))
            self._besides_s = besides_s if is_first else self._besides_s + SMOOTH * (besides_s - self._besides_s)

    def limit(self, sequences: int, drafting: int, num_drafts: int) -> Limit | None:
        """Return the limit of a step; None to verify all drafts.

        Args:
            sequences: Sequences of the step.
            drafting: Sequences with drafts.
            num_drafts: Sum of their drafts.
        """
        limit = self._pinned
        if limit is None and num_drafts > 0:
            limit = self._limit(sequences, drafting, num_drafts)
        self.last_limit = -1 if limit is None else limit.most_drafts
        return limit

    def _limit(self, sequences: int, drafting: int, num_drafts: int) -> Limit | None:
        is_known = self._sequences >= ENOUGH_SEQUENCES and self._rounds >= ENOUGH_ROUNDS and self.costs.is_known
        if not self._is_adaptive or not is_known:
            return None
        sizes = self.costs.sizes(sequences, sequences + num_drafts)
        if len(sizes.rows) <= 1:
            return None
        # Cumulative number of drafts by decreasing survival, for these sequences on average, and their expected tokens.
        share = drafting / self._sequences
        edges = np.concatenate([[0.0], (share * self._counts).cumsum()])
        tokens = np.concatenate([[0.0], (share * self._mass).cumsum()])
        room = np.minimum(sizes.rows - sequences, num_drafts).clip(0)
        throughput = (sequences + np.interp(room, edges, tokens)) / (sizes.seconds + self._besides_s)
        best = int(throughput.argmax())
        if room[best] >= num_drafts or throughput[best] < BETTER_BY * throughput[-1]:
            return None
        place = int(np.searchsorted(edges[1:], room[best]))
        least = 0.0 if place >= NUM_BINS - 1 else LEAST_SURVIVAL ** ((place + 1) / (NUM_BINS - 1))
        return Limit(least, int(room[best]))
