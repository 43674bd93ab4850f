"""Which drafts of a step are verified, over all its sequences: those that raise the expected tokens per second.

More rows make a pass longer. The budget of a step is the number of draft rows with the highest expected throughput,

    (sequences + sum of the drafts' survival) / (seconds of the pass + seconds of a round besides the pass),

where a draft's survival is the probability that it and all drafts before it are accepted. Zero drafts is one of the
numbers. Sources: DSpark (arXiv 2607.05147), vLLM PRs 47808 and 52228.

**Exactness.** With draft logits a draft that is not verified must be left out for reasons that its own value has no
part in; otherwise the verified ones are not distributed as q says (DSpark, appendix A). Of drafts d_1 .. d_k of a
sequence the confidence c_j is a function of the committed tokens and d_1 .. d_{j-1}. So c_{j+1} says something of d_j,
and whether d_j is verified may depend on c_1 .. c_j, not on any later one. Three things could break that:

- *The order.* d_j is verified only if d_1 .. d_{j-1} are, and its survival is a product of c_1 .. c_j.
- *A threshold* of this step's survivals depends on c_{j+1}. So `Limit`, threshold and number of rows, is made from
  earlier steps alone. Drafts that were not accepted then are drawn anew, with other noise, and say nothing of d_j.
- *The room.* Rows that d_2 of a sequence takes are not there for d_1 of another. Requests with one seed and prompt have
  equal drafts: what the later confidences of one decide is a function of the other's d_j. So `chosen` gives the rows
  away position by position: what it decides of position j depends on confidences of positions up to j, of whichever
  sequence.

Then the number of verified drafts is a stopping time of d_1, d_2, ..., and standard and block verification are exact
node by node of the tree of drafts. One-hot verification and `coupled` are exact whatever is left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from verifier_service.pacing.step_costs import Profile, StepCosts

# The distribution of survival: bins of equal width in its logarithm, from 1 down; the last has all that is below.
NUM_BINS, LEAST_SURVIVAL = 64, 2.0**-8
# A sequence's step counts half after this many further ones.
HALF_LIFE_SEQUENCES = 1024
# Sequences' steps before which all drafts are verified.
ENOUGH_SEQUENCES = 64
# Smoothing of the seconds of a round besides its pass, and rounds after which they are known.
SMOOTH, ENOUGH_ROUNDS = 1 / 16, 6
# Fewer than all drafts must be faster by this factor.
BETTER_BY = 1.01


class Limit(NamedTuple):
    """Bounds on the drafts that a step verifies, set before the drafts exist."""

    least_survival: float
    most_drafts: int  # of all sequences together


def chosen(survival: np.ndarray, limit: Limit) -> np.ndarray:
    """Return how many drafts of each sequence are verified, int64 [S].

    Args:
        survival: [S, k] of each draft; 0 where a sequence has none.
        limit: Where there is no room for all drafts of a position, those with the highest survival are verified.
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
    """Chooses the limit of each step of a verifier. Used by the engine's thread alone, but for what metrics read.

    Attributes:
        costs: Seconds of passes.
        offered, verified: Drafts that came, and those that were verified.
        last_limit: Draft rows that the last step with a limit had room for; -1 for a step without.
    """

    def __init__(self, profile: Profile, *, is_adaptive: bool) -> None:
        """Unless `is_adaptive` all drafts are verified."""
        self.costs = StepCosts(profile)
        self.offered = self.verified = 0
        self.last_limit = -1
        self._is_adaptive = is_adaptive
        self._counts = np.zeros(NUM_BINS)  # of drafts by survival
        self._mass = np.zeros(NUM_BINS)  # sum of their survival
        self._sequences = 0.0  # whose drafts those are
        self._besides_s = math.nan  # seconds of a round with drafts besides its pass
        self._rounds = 0
        self._pinned: Limit | None = None

    def pin(self, limit: Limit) -> None:
        """Use this limit in each step from now on, whatever is measured; for tests and measurements."""
        self._pinned = limit

    def count_offered(self, survival: np.ndarray) -> None:
        """Count drafts that came for a step that has been launched; [S, k], 0 where a sequence has none."""
        if not self._is_adaptive or len(survival) == 0:
            return
        keep = 0.5 ** (len(survival) / HALF_LIFE_SEQUENCES)
        values = survival[survival > 0.0]
        bins = (np.log(values) * ((NUM_BINS - 1) / math.log(LEAST_SURVIVAL))).astype(np.int64).clip(0, NUM_BINS - 1)
        self._counts = keep * self._counts + np.bincount(bins, minlength=NUM_BINS)
        self._mass = keep * self._mass + np.bincount(bins, values, minlength=NUM_BINS)
        self._sequences = keep * self._sequences + len(survival)

    def count_step(self, sequences: int, rows: int, pass_s: float, round_s: float, *, has_drafts: bool) -> None:
        """Learn from a step without prompts, `round_s` after the one before it."""
        self.costs.count(sequences, rows, pass_s)
        if has_drafts:
            besides_s = max(0.0, round_s - pass_s)
            self._rounds += 1
            is_first = math.isnan(self._besides_s)
            # One stall of the host must not look like a long way to the drafter.
            besides_s = besides_s if is_first else min(besides_s, 4.0 * (self._besides_s + pass_s))
            self._besides_s = besides_s if is_first else self._besides_s + SMOOTH * (besides_s - self._besides_s)

    def limit(self, sequences: int, drafting: int, num_drafts: int) -> Limit | None:
        """Return the limit of a step; None where all drafts are to be verified.

        Args:
            sequences, drafting: Sequences of the step, and those of them that have drafts.
            num_drafts: Drafts of all of them together.
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
        # Drafts by falling survival, as many as the drafting sequences have on average, and the tokens that they bring.
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
