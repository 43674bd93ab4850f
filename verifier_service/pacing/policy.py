"""Whether drafts are requested from a drafter: where they raise the measured throughput at the current load.

The decision depends on times, on the number of requests and on the acceptance of earlier drafts. It is fixed before the
drafts exist, and is independent of their values and of the distribution that they are sampled from. So the acceptance
tests are exact for any decision of this module. How many of the received drafts are verified is decided by
`pacing.budget`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from verifier_service.pacing.calibration import Calibration
from verifier_service.pacing.step_costs import StepCosts
from verifier_service.pacing.throughput import Arm

# The load bucket changes when the number of requests leaves its bounds by this factor.
STICKY = 1.25
# Rounds needed before a measured throughput is used.
ENOUGH_ROUNDS = 6
# Drafts are disabled when they have lost the time of GIVE_UP_STEPS steps without drafts; including the time in which
# sequences catch up, which later rounds can regain, GIVE_UP_DEBT_STEPS steps.
GIVE_UP_STEPS, GIVE_UP_DEBT_STEPS = 8.0, 16.0
# Most steps without drafts that one step can count as lost: a single stall is no reason to disable drafts. The first
# steps at a load do not count, because they load kernels.
MOST_LOST_STEPS, FIRST_STEPS = 4.0, 2
# Maximum share of the time lost by drafts before they are disabled; minimum and maximum seconds of rest after that.
LOSS_SHARE = 0.02
REST_S = (1.0, 30.0)
# Smoothing of the share of steps with prompts; a load has prompts from the second bound on, until the first.
PROMPT_SMOOTH, LEAST_PROMPT_SHARE, PROMPT_SHARE = 1 / 8, 0.25, 0.5
# Maximum number of steps of the trial without drafts, where the time of such steps was not measured at start.
TRIAL_STEPS = 4 * ENOUGH_ROUNDS


class StepCount(NamedTuple):
    """A step, as one drafter's policy counts it. Its times exclude those of prompt rows."""

    now: float  # monotonic time at which the host had its tokens
    seconds: float  # since the previous step's tokens
    pass_s: float  # seconds of the step's own forward pass and sampling
    requests: int  # running requests, and waiting requests that can be admitted
    drafts: int  # maximum of drafts received for a sequence of this drafter; 0 if none were received
    drafted: int  # sequences of this drafter that received this maximum
    other_tokens: float  # expected tokens of all other requests in the step
    others_draft: bool  # whether drafts are requested from another drafter
    catches_up: bool  # whether no drafts are requested for this drafter's sequences because they lack rows
    has_prompts: bool  # whether this step or the previous one computed prompts


@dataclass
class _Bucket:
    """Measurements at one load."""

    arms: list[Arm]  # by number of received drafts
    is_off: bool
    rest_until: float = -math.inf
    lost_steps: float = 0.0  # steps without drafts that rounds with drafts cost more than they gained
    debt_steps: float = 0.0  # the same for all steps since drafts resumed
    debt_s: float = 0.0  # the same in seconds, with the whole time of stalls
    steps: int = 0  # counted at this load

    def reset_losses(self) -> None:
        """Set the losses to zero."""
        self.lost_steps = self.debt_steps = self.debt_s = 0.0


class DraftingPolicy:
    """Decides for each load whether drafts are requested from one drafter.

    A load bucket is a range of numbers of requests, with or without prompts in most steps.

    Drafts are requested at first. Drafts that cost more than they gain are disabled for a rest, and then tried again.
    The rest is long enough that the loss is a small share of the time.
    """

    def __init__(self, max_drafts: int, calibration: Calibration, costs: StepCosts, *, is_adaptive: bool) -> None:
        """Each request gets up to `max_drafts` drafts, always unless `is_adaptive`."""
        self.is_adaptive = is_adaptive
        self._max_drafts = max_drafts
        self._calibration = calibration
        self._costs = costs
        self._size = 0  # bit length of the load bucket's number of requests
        self._bucket = self._new_bucket(is_off=False)
        self._buckets: dict[tuple[int, bool, bool], _Bucket] = {}
        self._prompt_share = 0.0  # smoothed share of steps with prompts
        self._has_prompts = False  # whether most recent steps have prompts
        self._trial_left = 0  # remaining steps of a trial without drafts
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
        return 0 if self._bucket.is_off or self._trial_left > 0 else self._max_drafts

    @property
    def is_off(self) -> bool:
        """Return whether the drafter is sent nothing, because drafts lower the throughput."""
        return self._bucket.is_off if self._pinned is None else self._pinned == 0

    def count(self, step: StepCount) -> None:
        """Count a step, and decide about drafts for later steps."""
        if step.requests == 0:
            return
        self._prompt_share += PROMPT_SMOOTH * (step.has_prompts - self._prompt_share)
        had_prompts = self._has_prompts
        self._has_prompts = self._prompt_share > (LEAST_PROMPT_SHARE if had_prompts else PROMPT_SHARE)
        if step.has_prompts and not self._has_prompts:
            return
        self._last = step
        self._turn_to(step, had_prompts=had_prompts)
        self._measure(step)
        bucket = self._bucket
        bucket.steps += 1
        if not self.is_adaptive or self._pinned is not None:
            return
        if bucket.is_off:
            if step.now >= bucket.rest_until:
                self._take_up()
        elif bucket.lost_steps >= GIVE_UP_STEPS or bucket.debt_steps >= GIVE_UP_DEBT_STEPS:
            self._give_up(step.now)
        else:
            self._run_trial()

    def speed_without(self) -> float:
        """Return tokens per second of one request without drafts at this load; 0 if unknown."""
        arm, step = self._bucket.arms[0], self._last
        if arm.rounds >= ENOUGH_ROUNDS:
            return arm.speed(1.0)
        if step is None or step.others_draft or not self._costs.is_known:
            return 0.0
        seconds = self._costs.seconds(step.requests, step.requests)
        return 1.0 / seconds if seconds > 0.0 else 0.0

    def speeds(self) -> list[float]:
        """Return tokens per second of one request with 0, 1, .. drafts at this load; 0 for unmeasured numbers."""
        expected = self._calibration.expected_tokens()
        measured = [arm.speed(tokens) for arm, tokens in zip(self._bucket.arms, expected, strict=True)]
        return [self.speed_without(), *measured[1:]]

    def _new_bucket(self, *, is_off: bool) -> _Bucket:
        return _Bucket([Arm() for _ in range(self._max_drafts + 1)], is_off)

    def _turn_to(self, step: StepCount, *, had_prompts: bool) -> None:
        """Switch to the bucket of the step's load.

        A new bucket starts with the decision of the last one, but a bucket without prompts does not take over a
        decision beside prompts. When prompts begin, the decision without prompts at this number of requests continues,
        because drafts gain less beside prompts.
        """
        low, high = 2 ** max(self._size - 1, 0), 2**self._size - 1
        if not low / STICKY <= step.requests <= high * STICKY:
            self._size = step.requests.bit_length()
        before, key = self._bucket, (self._size, step.others_draft, self._has_prompts)
        if key not in self._buckets:
            bucket = self._buckets[key] = self._new_bucket(is_off=before.is_off and self._has_prompts == had_prompts)
            bucket.rest_until = before.rest_until
        self._bucket = bucket = self._buckets[key]
        without_prompts = self._buckets.get((self._size, step.others_draft, False))
        if self._has_prompts and not had_prompts and without_prompts is not None:
            bucket.is_off, bucket.rest_until = without_prompts.is_off, without_prompts.rest_until
            bucket.reset_losses()
        if bucket is not before:
            self._trial_left, self._round, self._had_drafts = 0, Arm(), True

    def _measure(self, step: StepCount) -> None:
        """Add the step to its arm."""
        bucket, has_drafts = self._bucket, step.drafts > 0
        if self.num_drafts == 0 and not has_drafts:
            # A trial's steps would wait for messages to drafters, which are not sent while drafts are off.
            is_alone = self._trial_left > 0 and not step.others_draft
            if not self._had_drafts:
                seconds = step.pass_s if is_alone else step.seconds
                bucket.arms[0].add(0.0, step.other_tokens, step.requests * seconds)
            self._round = Arm()
        elif step.catches_up:
            self._round = Arm()
        else:
            self._round.add(step.drafted, step.other_tokens, step.requests * step.seconds)
            if has_drafts:
                done, self._round = self._round, Arm()
                bucket.arms[step.drafts].add(done.drafted, done.other_tokens, done.request_s)
        self._count_loss(step)
        self._had_drafts = has_drafts

    def _count_loss(self, step: StepCount) -> None:
        """Add what the step lost compared to steps without drafts; gains count for GIVE_UP_STEPS steps at most."""
        bucket, without = self._bucket, self.speed_without()
        if without == 0.0 or bucket.is_off or bucket.steps < FIRST_STEPS:
            return
        tokens = step.other_tokens
        if step.drafted > 0:
            tokens += step.drafted * self._calibration.expected_tokens()[step.drafts]
        lost_steps = step.seconds * without - tokens / step.requests
        counted = min(lost_steps, MOST_LOST_STEPS)
        if (self.num_drafts > 0 or step.drafts > 0) and not step.catches_up:
            bucket.lost_steps = max(bucket.lost_steps + counted, -GIVE_UP_STEPS)
        bucket.debt_steps = max(bucket.debt_steps + counted, -GIVE_UP_STEPS)
        bucket.debt_s = max(bucket.debt_s + lost_steps / without, -GIVE_UP_STEPS / without)

    def _take_up(self) -> None:
        bucket = self._bucket
        bucket.is_off = False
        bucket.reset_losses()
        bucket.arms[self._max_drafts] = self._round = Arm()

    def _give_up(self, now: float) -> None:
        bucket = self._bucket
        bucket.rest_until = now + min(max(bucket.debt_s / LOSS_SHARE, REST_S[0]), REST_S[1])
        bucket.is_off, self._trial_left = True, 0

    def _run_trial(self) -> None:
        """Request no drafts for a few steps if the throughput without drafts is unknown."""
        bucket = self._bucket
        if self._trial_left > 0:
            self._trial_left = 0 if self.speed_without() > 0.0 else self._trial_left - 1
        elif self.speed_without() == 0.0:
            # If sequences never catch up, no round is completed.
            is_overdue = bucket.steps >= TRIAL_STEPS and bucket.steps % TRIAL_STEPS == 0
            if bucket.arms[self._max_drafts].rounds >= ENOUGH_ROUNDS or is_overdue:
                bucket.arms[0] = Arm()
                self._trial_left = TRIAL_STEPS
