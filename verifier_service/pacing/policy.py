"""The number of drafts requested from a drafter: the one with the highest measured throughput at the current load.

The number depends on times, on the number of running requests and on the acceptance of earlier drafts. It is fixed
before the drafts exist, and is independent of their values and of the distribution that they are sampled from. So the
acceptance tests are exact for any decision of this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier_service.pacing.calibration import Calibration
from verifier_service.pacing.step_costs import Profile
from verifier_service.pacing.throughput import Arm

# The load bucket changes when the number of requests leaves its bounds by this factor.
STICKY = 1.25
# Rounds needed before an arm's throughput is used, and rounds of a probe.
ENOUGH_ROUNDS = 6
# A number of drafts must be faster by this factor to replace another.
BETTER_BY = 1.03
# Drafts are disabled when they have lost the time of GIVE_UP_STEPS steps without drafts; including the time in which
# sequences catch up, which later rounds can regain, GIVE_UP_DEBT_STEPS steps.
GIVE_UP_STEPS, GIVE_UP_DEBT_STEPS = 8.0, 16.0
# Maximum share of the time lost by probes and by drafts before they are disabled; minimum and maximum seconds of rest
# after drafts were disabled.
LOSS_SHARE = 0.02
REST_S = (1.0, 30.0)
# Minimum rest after a probe, in durations of the probe.
PROBE_REST = 20.0


class StepCount(NamedTuple):
    """A step without prompts, as one drafter's policy counts it."""

    now: float  # monotonic time at which the host had its tokens
    seconds: float  # since the previous step's tokens
    pass_s: float  # seconds of the step's own forward pass and sampling
    requests: int  # decoding requests, in this step or waiting for another
    drafts: int  # maximum of drafts received for a sequence of this drafter; 0 if none were received
    drafted: int  # sequences of this drafter that received this maximum
    other_tokens: float  # expected tokens of all other requests in the step
    others_draft: bool  # whether drafts are requested from another drafter
    catches_up: bool  # whether no drafts are requested for this drafter's sequences because they lack rows


@dataclass
class _Probe:
    num_drafts: int
    began: float
    steps_left: int


@dataclass
class _Bucket:
    """Measurements at one load."""

    arms: list[Arm]
    num_drafts: int
    next_drafts: int  # number of drafts after a rest
    rest_until: float = -math.inf
    lost_s: float = 0.0  # seconds lost by rounds with drafts compared to none, minus gains
    debt_s: float = 0.0  # the same for all steps since drafts resumed
    probe_at: float = -math.inf
    steps: int = 0  # counted at this load
    probed: dict[int, float] = field(default_factory=dict)  # time of each arm's last probe


class DraftCountPolicy:
    """Chooses the number of drafts of one drafter, by load bucket.

    Each bucket starts at the maximum. A neighbouring number is probed for a few rounds periodically, and kept if it is
    faster. Drafts that cost more than they gain are disabled for a rest, and then tried again. The rest is long enough
    that the loss is a small share of the time.
    """

    def __init__(self, max_drafts: int, calibration: Calibration, profile: Profile, *, is_adaptive: bool) -> None:
        """`max_drafts` are requested at first, and always unless `is_adaptive`."""
        self.is_adaptive = is_adaptive
        self._max_drafts = max_drafts
        self._calibration = calibration
        self._profile = profile
        self._size = 0  # bit length of the load bucket's number of requests
        self._bucket = self._new_bucket(max_drafts)
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        self._probe: _Probe | None = None
        self._round = Arm()  # since the last step that had drafts
        self._had_drafts = True  # whether the previous step had drafts
        self._last: StepCount | None = None
        self._pinned: int | None = None

    def pin(self, num_drafts: int) -> None:
        """Fix the number of drafts; for tests and measurements."""
        self._pinned = num_drafts

    @property
    def num_drafts(self) -> int:
        """Return the number of drafts to request for each sequence."""
        if self._pinned is not None:
            return self._pinned
        return self._bucket.num_drafts if self._probe is None else self._probe.num_drafts

    @property
    def is_off(self) -> bool:
        """Return whether the drafter is sent nothing, because drafts lower the throughput."""
        return (self._bucket.num_drafts if self._pinned is None else self._pinned) == 0

    def count(self, step: StepCount) -> None:
        """Count a step, and choose the number of drafts for later steps."""
        if step.requests == 0:
            return
        self._last = step
        self._turn_to(step)
        self._measure(step)
        self._bucket.steps += 1
        if not self.is_adaptive or self._pinned is not None:
            return
        if self.is_off:
            if step.now >= self._bucket.rest_until:
                self._take_up()
            return
        without = self.speed_without()
        if without > 0.0:
            limit_s = 1.0 / without
            bucket = self._bucket
            if bucket.lost_s >= GIVE_UP_STEPS * limit_s or bucket.debt_s >= GIVE_UP_DEBT_STEPS * limit_s:
                self._give_up(step.now)
                return
        self._run_probes(step)

    def speed_without(self) -> float:
        """Return tokens per second of one request without drafts at this load; 0 if unknown."""
        arm, step = self._bucket.arms[0], self._last
        if arm.rounds >= ENOUGH_ROUNDS:
            return arm.speed(1.0)
        pass_s = None if step is None or step.others_draft else self._profile.seconds(step.requests, step.requests)
        return 0.0 if pass_s is None else 1.0 / pass_s

    def speeds(self) -> list[float]:
        """Return tokens per second of one request with 0, 1, .. drafts at this load; 0 for unmeasured numbers."""
        expected = self._calibration.expected_tokens()
        measured = [arm.speed(tokens) for arm, tokens in zip(self._bucket.arms, expected, strict=True)]
        return [self.speed_without(), *measured[1:]]

    def _new_bucket(self, num_drafts: int) -> _Bucket:
        return _Bucket([Arm() for _ in range(self._max_drafts + 1)], num_drafts, self._max_drafts)

    def _turn_to(self, step: StepCount) -> None:
        """Switch to the bucket of the step's load; a new bucket starts as a copy of the last."""
        low, high = 2 ** max(self._size - 1, 0), 2**self._size - 1
        if not low / STICKY <= step.requests <= high * STICKY:
            self._size = step.requests.bit_length()
        before, key = self._bucket, (self._size, step.others_draft)
        if key not in self._buckets:
            bucket = self._buckets[key] = self._new_bucket(before.num_drafts)
            bucket.next_drafts, bucket.rest_until = before.next_drafts, before.rest_until
        self._bucket = self._buckets[key]
        if self._bucket is not before:
            self._probe, self._round, self._had_drafts = None, Arm(), True

    def _measure(self, step: StepCount) -> None:
        """Add the step to its arm."""
        bucket, has_drafts = self._bucket, step.drafts > 0
        tokens = step.drafted * self._calibration.expected_tokens()[step.drafts] + step.other_tokens
        without = self.speed_without()
        lost_s = 0.0 if without == 0.0 else step.seconds - tokens / (without * step.requests)
        if self.num_drafts == 0 and not has_drafts:
            # A probe's steps would wait for messages to drafters, which are not sent while drafts are off.
            is_alone = self._probe is not None and not step.others_draft
            if not self._had_drafts:
                seconds = step.pass_s if is_alone else step.seconds
                bucket.arms[0].add(0.0, step.other_tokens, step.requests * seconds)
            self._round = Arm()
        elif step.catches_up:
            self._round = Arm()
        else:
            self._round.add(step.drafted, step.other_tokens, step.requests * step.seconds)
            bucket.lost_s += lost_s
            if has_drafts:
                done, self._round = self._round, Arm()
                bucket.arms[step.drafts].add(done.drafted, done.other_tokens, done.request_s)
        if not self.is_off:
            bucket.debt_s += lost_s
        if without > 0.0:  # old gains do not count
            least_s = -GIVE_UP_STEPS / without
            bucket.lost_s, bucket.debt_s = max(bucket.lost_s, least_s), max(bucket.debt_s, least_s)
        self._had_drafts = has_drafts

    def _take_up(self) -> None:
        bucket = self._bucket
        bucket.num_drafts, bucket.lost_s, bucket.debt_s = bucket.next_drafts, 0.0, 0.0
        bucket.arms[bucket.num_drafts] = Arm()
        self._round = Arm()

    def _give_up(self, now: float) -> None:
        bucket = self._bucket
        rest_s = min(max(bucket.debt_s / LOSS_SHARE, REST_S[0]), REST_S[1])
        bucket.rest_until = now + rest_s
        bucket.next_drafts = bucket.num_drafts // 2 or self._max_drafts
        bucket.num_drafts, self._probe = 0, None

    def _run_probes(self, step: StepCount) -> None:
        bucket, probe, now = self._bucket, self._probe, step.now
        if probe is None:
            # If sequences never catch up, no round is completed; then the throughput without drafts is probed.
            is_overdue = self.speed_without() == 0.0 and bucket.steps >= 4 * ENOUGH_ROUNDS
            has_rounds = bucket.arms[bucket.num_drafts].rounds >= ENOUGH_ROUNDS
            if now >= bucket.probe_at and (has_rounds or is_overdue):
                self._begin_probe(now)
            return
        probe.steps_left -= 1
        arm = bucket.arms[probe.num_drafts]
        if arm.rounds < ENOUGH_ROUNDS and probe.steps_left > 0:
            return
        self._probe = None
        length_s, speeds = now - probe.began, self.speeds()
        kept = speeds[bucket.num_drafts]
        share = speeds[probe.num_drafts] / kept if kept > 0.0 else 1.0
        bucket.probed[probe.num_drafts] = now
        bucket.probe_at = now + max(PROBE_REST * length_s, (1 - share) * length_s / LOSS_SHARE)
        if arm.rounds >= ENOUGH_ROUNDS and probe.num_drafts > 0 and share > BETTER_BY:
            bucket.num_drafts, bucket.probe_at = probe.num_drafts, now

    def _begin_probe(self, now: float) -> None:
        """Probe the neighbour that was probed longest ago, or no drafts if their throughput is unknown."""
        bucket = self._bucket
        k = bucket.num_drafts
        if self.speed_without() == 0.0:
            number = 0
        else:
            neighbours = [one for one in (k - 1, k + 1) if 1 <= one <= self._max_drafts]
            if not neighbours:
                return
            number = min(neighbours, key=lambda one: bucket.probed.get(one, -math.inf))
        bucket.arms[number] = Arm()
        self._probe = _Probe(number, now, 4 * ENOUGH_ROUNDS)
