"""What a step costs and brings: the target's pass, a drafter's answer and the acceptance of its drafts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from operator import mul
from typing import TypeVar

import numpy as np

from verifier_service.pacing.estimate import CLOCK_S, LinearEstimate

# Observations after which an estimate decides.
ENOUGH = 8
# How far costs may move in a second, as shares: those of a target, those of a link that others use too, and those of
# the host, or of a device that others use too, which follow the load.
TARGET_DRIFT = 0.02
LINK_DRIFT = 0.1
HOST_DRIFT = 0.5
# Of the host's time before a step the median of the last so many counts: a host that stalls does so for a few steps.
HOST_STEPS = 9
# Where so many answers beside steps in a row are sooner than those for which nothing else ran, those are sooner by now
# too; so is one that takes less than this share of what those do, as far as an estimate believes one alone. As long as
# few of those have been seen, none beside steps is sooner than they are.
SOONER_IN_A_ROW = 16
FAR_SOONER = 0.5
# What sequences that take turns cost each other, as a share of the shortest step, where nothing has shown it: a GPU
# computes slower back to back than with breaks (a pass of 160 rows of the 8B shape on an H200 by 5 %). What was seen is
# half forgotten after each so many seconds in which they take none.
TURN_SHARE = 0.07
TURN_FADES_S = 5.0
# What the host takes where nothing runs meanwhile is half forgotten after each so many seconds in which no drafts are
# waited for: it is not seen then, and would keep them away for what it was in a bad moment.
LEAD_FADES_S = 3.0
# The cost of a step of few rows is uncertain, and tried out, from this share on, and no more often than this.
UNCERTAIN = 0.05
EXPLORE_EVERY_S = 1.0
# Acceptance: what is assumed of the first position, how many drafts that counts for, and after how many verify steps a
# draft counts half, in all and of each sequence; and of trials, which are far between. A position of which nothing is
# known takes after the one before it.
FIRST_RATE = 0.7
PRIOR_DRAFTS = 4.0
HALF_LIFE_STEPS = (64, 16)
HALF_LIFE_TRIALS = 8
MOST_WEIGHT = 1e9

_Rows = TypeVar("_Rows", float, np.ndarray)


class _LazyEstimate:
    """A `LinearEstimate` that works observations in when it is read, so that this can be done when there is time."""

    def __init__(self, shares: Sequence[float], drift: float) -> None:
        self._estimate = LinearEstimate(shares, drift)
        self._news: list[tuple[tuple[float, ...], float, float]] = []

    def observe(self, causes: tuple[float, ...], seconds: float, now: float) -> None:
        """See `LinearEstimate`."""
        self._news.append((causes, seconds, now))

    def read(self) -> LinearEstimate:
        """The estimate after all observations."""
        for observation in self._news:
            self._estimate.observe(*observation)
        self._news.clear()
        return self._estimate


class Profile:
    """How the time of a forward pass grows with its rows: measured once, on a GPU, where it is no straight line.

    Without a measurement it is one: rows count for themselves.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        """`seconds` of passes of so many rows."""
        rows = sorted(seconds or ())
        self._rows = np.array(rows, np.float64)
        # More rows never take less, but for noise.
        self._seconds = np.maximum.accumulate(np.array([(seconds or {})[one] for one in rows], np.float64))

    @property
    def is_measured(self) -> bool:
        """Whether `size` is in seconds."""
        return len(self._rows) > 1

    def size(self, rows: _Rows) -> _Rows:
        """What so many rows count for, beyond what no row counts for; beyond the largest pass as its last rows do."""
        if not self.is_measured:
            return rows
        xs, ys = self._rows, self._seconds
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        beyond = np.maximum(np.subtract(rows, xs[-1]), 0.0) * slope
        size = np.interp(rows, xs, ys) + beyond
        return size if isinstance(rows, np.ndarray) else float(size)


class TargetCost:
    """Time of a step without prompts: fixed + rows + feature rows sent before it.

    Where steps are launched before the tokens of those before them are known, that is the device's time, and the host's
    is kept apart: before a step that was launched when nothing ran it is part of what its requests wait for (`lead_s`);
    beside a step that runs there is hardly any (`beside_s`). What sequences that take turns cost each other is a cost
    of its own (`turn_s`), for a drafter may compute on the target's own device meanwhile. None of the three depends on
    rows: steps of one request are no measure of the host's time before those of many.

    Attributes
    ----------
    lead_seen
        Monotonic time at which `lead_s` was observed last; infinite before.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile or Profile()
        # The first step is as long as its pass, if that was measured.
        shares = (0.0, 1.0, 0.0) if self._profile.is_measured else (1.0, 0.0, 0.0)
        self._estimate = _LazyEstimate(shares, TARGET_DRIFT)
        self._lead: deque[float] = deque(maxlen=HOST_STEPS)
        self._beside: deque[float] = deque(maxlen=HOST_STEPS)
        self._turn = _LazyEstimate((1.0,), HOST_DRIFT)
        self._explored = 0.0
        self._now = -math.inf
        self.lead_seen = math.inf
        self._turn_seen = -math.inf

    def observe(self, rows: int, feature_rows: int, seconds: float, now: float) -> None:
        """Takes a step of `rows`, before which the drafters were sent `feature_rows`."""
        self._now = now
        self._estimate.observe((1.0, self._profile.size(rows), feature_rows), seconds, now)

    def observe_host(self, seconds: float, now: float, *, is_beside: bool) -> None:
        """Takes the time in which the device waited for the host before a step, one launched beside a step that ran or
        one launched when nothing did."""
        (self._beside if is_beside else self._lead).append(seconds)
        if not is_beside:
            self.lead_seen = now

    def observe_turn(self, rows: int, seconds: float, host_s: float, now: float) -> None:
        """Takes a step of `rows` that verified drafts beside another one, and the host's time as `observe_host`."""
        self._turn.observe((1.0,), host_s + max(0.0, seconds - self.seconds(rows)), now)
        self._turn_seen = now

    def settle(self) -> None:
        """Works in the steps taken, which the next use would do."""
        self._estimate.read()
        self._turn.read()

    @property
    def is_known(self) -> bool:
        """Whether enough steps have been seen."""
        return self._estimate.read().count >= ENOUGH

    @property
    def fixed(self) -> float:
        """Seconds that a step takes whatever its rows: what two steps pay twice and a joint one once."""
        return self.seconds(0)

    @property
    def per_feature_row(self) -> float:
        """Seconds of each feature row that is sent before a step."""
        return self._estimate.read().weights[2]

    def seconds(self, rows: _Rows) -> _Rows:
        """Expected time, above 0, of steps that no features were sent before."""
        fixed, of_size, _ = self._estimate.read().weights
        return max(fixed, CLOCK_S) + of_size * self._profile.size(rows)

    @property
    def lead_s(self) -> float:
        """Expected time from one step's tokens to the next step's launch that the host takes when nothing else runs."""
        unseen_s = max(0.0, self._now - max(self.lead_seen, self._turn_seen))
        return _median(self._lead) * 0.5 ** (unseen_s / LEAD_FADES_S)

    @property
    def beside_s(self) -> float:
        """Expected time by which the host holds up a step although another one runs meanwhile."""
        return _median(self._beside)

    @property
    def turn_s(self) -> float:
        """Expected time by which a step of sequences that take turns is later for the host, and longer than alone; what
        was seen of it fades while none do, so that they come to show what it is by now."""
        assumed = TURN_SHARE * self.fixed if self._profile.is_measured else 0.0
        turn = self._turn.read()
        if turn.count == 0:
            return assumed
        if not self._turn_seen < self.lead_seen < math.inf:
            return turn.weights[0]
        return assumed + (turn.weights[0] - assumed) * 0.5 ** ((self.lead_seen - self._turn_seen) / TURN_FADES_S)

    def wants_step_of(self, rows: float, now: float) -> bool:
        """Whether a step of about so many rows should be tried out; once it says so, it rests for a while.

        A profile that was measured shows what it would.
        """
        if self._profile.is_measured or not self.is_known or now < self._explored + EXPLORE_EVERY_S:
            return False
        is_uncertain = self._estimate.read().uncertainty((1.0, rows, 0.0)) > UNCERTAIN * self.seconds(rows)
        if is_uncertain:
            self._explored = now
        return is_uncertain


def _median(seconds: Collection[float]) -> float:
    """0 of none."""
    return statistics.median(seconds) if seconds else 0.0


class DrafterCost:
    """Time from a message to its answer: round trip + bytes + the computing time that the drafter tells.

    A drafter may compute on the target's own device: by how much it takes longer while a step runs is a cost of its own
    (`beside_s`), and not what it takes alone. For answers to sequences that take turns always come beside steps, and
    would never show that one group is faster. Rows of prompts and histories are a cost of their own too: no graph has
    been captured for them, so that a message of a few takes longer than one for the drafts of many sequences.
    """

    def __init__(self) -> None:
        # The first messages are often of as many bytes each: thought free, these would fill a narrow link.
        self._link = _LazyEstimate((0.5, 0.5), LINK_DRIFT)
        self._compute = LinearEstimate((0.2, 0.8, 0.0, 0.0), LINK_DRIFT)
        self._histories = _LazyEstimate((0.5, 0.5), LINK_DRIFT)
        self._beside = LinearEstimate((1.0,), HOST_DRIFT)
        self._num_alone = 0  # answers with drafts for which nothing else ran
        self._num_sooner = 0  # others, the last ones, that came sooner nevertheless
        self._news: list[tuple[tuple[float, ...], float, float, bool]] = []

    def observe_link(self, seconds: float, num_bytes: int, now: float, *, is_queued: bool = False) -> None:
        """Takes the time from a message of so many bytes until its answer, computing taken off; where it `is_queued`
        behind another one on the link, from when the bytes of that were through."""
        if num_bytes or not is_queued:
            self._link.observe((float(not is_queued), num_bytes), seconds, now)

    def observe_compute(
        self, seconds: float, rows: int, drafts: int, sequences: int, now: float, *, is_beside: bool
    ) -> None:
        """Takes a drafter's computing time for drafts behind rows of a verify step.

        Parameters
        ----------
        rows
            Of the message, no more of a sequence than a verify step brings.
        drafts, sequences
            Drafts wanted of each sequence, and of how many.
        is_beside
            Whether the target computed a step in that time.
        """
        self._news.append(((1.0, drafts, drafts * sequences, rows), seconds, now, is_beside))

    def observe_histories(self, seconds: float, rows: int, now: float) -> None:
        """Takes a drafter's computing time for other rows."""
        self._histories.observe((1.0, rows), seconds, now)

    def settle(self) -> None:
        """Works in the answers taken, which the next use would do."""
        self._link.read()
        self._histories.read()
        for causes, compute_s, now, is_beside in self._news:
            self._num_alone += not is_beside
            is_new = not self._compute.has_seen(causes)
            if not is_beside or is_new or self._is_sooner(compute_s, self._compute.predict(causes), now):
                self._compute.observe(causes, compute_s, now)
        self._news.clear()

    def _is_sooner(self, seconds: float, alone_s: float, now: float) -> bool:
        """Takes what an answer beside a step took that was thought to take `alone_s` alone; whether one alone would be
        sooner than that."""
        self._beside.observe((1.0,), seconds - alone_s, now)
        self._num_sooner = self._num_sooner + 1 if seconds < alone_s else 0
        least = 1 if self._num_alone < ENOUGH else SOONER_IN_A_ROW
        return self._num_sooner >= least or seconds < FAR_SOONER * alone_s

    @property
    def is_link_known(self) -> bool:
        """Whether enough answers have been seen."""
        return self._link.read().count >= ENOUGH

    @property
    def is_known(self) -> bool:
        """Whether there were drafts among them too."""
        return self.is_link_known and (self._compute.count > 0 or bool(self._news))

    @property
    def jitter(self) -> float:
        """Standard deviation of an answer around its expected time, seconds."""
        return self._link.read().noise

    @property
    def link(self) -> tuple[float, float]:
        """Seconds of a round trip and of each byte."""
        fixed, per_byte = self._link.read().weights
        return fixed, per_byte

    @property
    def compute(self) -> tuple[float, float, float, float]:
        """Seconds of an answer, of each draft position, of each draft and of each row, while no step runs."""
        self.settle()
        fixed, per_position, per_draft, per_row = self._compute.weights
        return fixed, per_position, per_draft, per_row

    @property
    def beside_s(self) -> float:
        """Expected time by which an answer takes longer while a step runs."""
        self.settle()
        return self._beside.weights[0]

    def transfer_s(self, num_bytes: int) -> float:
        """Expected time on the link, both ways."""
        return self._link.read().predict((1.0, num_bytes))

    def compute_s(self, rows: int, drafts: int, sequences: int, *, is_beside: bool) -> float:
        """Expected computing time, beside a step or while none runs."""
        alone_s = sum(map(mul, self.compute, (1.0, drafts, drafts * sequences, rows)))
        return alone_s + (self.beside_s if is_beside else 0.0)

    def histories_s(self, rows: int) -> float:
        """Expected computing time of rows of prompts and histories."""
        return self._histories.read().predict((1.0, rows))

    @property
    def per_history_row(self) -> float:
        """Seconds of each of those."""
        return self._histories.read().weights[1]


class Acceptance:
    """Rates at which a drafter's drafts are accepted, given that those before them were."""

    def __init__(self, max_drafts: int) -> None:
        self._tested = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts
        self._weight = 1.0  # of the next verify step; growing weights age what has been counted
        self._growth = 0.0
        self.forget_over(1)

    def forget_over(self, sequences: int) -> None:
        """Sets how many sequences tell of their drafts, by which verify steps come sooner; 0: in trials alone."""
        in_all, of_each = HALF_LIFE_STEPS
        half_life = max(in_all, of_each * sequences) if sequences else HALF_LIFE_TRIALS
        self._growth = 2 ** (1 / half_life)
        # What has been counted counts for no more than if it had been forgotten like that all the time.
        most = self._weight / (1 - 1 / self._growth)
        self._weight *= max(1.0, self._tested[0] / most)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Takes a verify step of one sequence: of its drafts the first `num_accepted` were accepted."""
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
        """Tokens that a verify step of 0, 1, .. drafts emits, [max_drafts + 1], from 1 up."""
        rate, reached, tokens = FIRST_RATE, 1.0, [1.0]
        prior = PRIOR_DRAFTS * self._weight
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            rate = (accepted + prior * rate) / (tested + prior)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens
