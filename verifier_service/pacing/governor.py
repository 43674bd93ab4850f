"""How many drafts a drafter is asked for, down to none, and how it is looked after while it is asked for none.

The number depends on times, on how many sequences run and on what became of earlier drafts: never on a draft's own
value or on the distribution that it was drawn from. It is fixed before the drafts exist, and none that came in time is
left out for what it is. So every set of drafts that is verified is one that the acceptance tests are exact for,
whatever this module decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from verifier_service.pacing.hindsight import Made
from verifier_service.pacing.plan import OFF, Forecast, Plan

# A plan must win by so much to replace another; drafts must gain so much to be taken up again, and to be kept.
BETTER_BY = 1.03
RESUME_ABOVE = 1.06
KEEP_ABOVE = 1.01
# They are given up when what they have lost, less what they have gained, adds up to so many steps: a few drafts, or
# those of the first tokens of texts, say little of others. Of what they have gained before as much counts, so that a
# host that stalls for a moment does not end drafts that pay. Drafts that would gain nothing if all were accepted are
# given up at once.
GIVE_UP_AFTER_STEPS = 6.0
# While sequences catch up, which is made up for later, they are given up when all that was lost and not made up for yet
# adds up to so many; more is not remembered.
OWE_STEPS = 10.0
# They must gain for so many plans in a row, at one scale of the load: where requests end together drafts are faster for
# the few that are left, until the next ones come a moment later.
RESUME_AFTER = 5
# A drafter whose drafts are slower than none goes on with so many sequences, which show when that changes.
NUM_SCOUTS = 2
# A drafter that is asked for nothing is sent a message so often, which shows how far it is, and its drafts are not
# waited for.
PING_EVERY_S = 0.2
# The share of its time that a sequence may spend on waiting for a drafter that is otherwise asked for nothing.
TRIAL_SHARE = 0.005
# A drafter that was given up rests so long; each time that it is given up again soon, twice as long; and until what was
# lost is this share of the time. While sequences catch up half as much is borne.
REST_S = (1.0, 30.0)
LOST_SHARE = 0.02
BEAR_SHARE = LOST_SHARE / 2
RELAPSE_WITHIN = 10.0  # rests
# What the host takes where sequences do not take turns is not seen while they do: one group is tried out after so long,
# and twice as long each time that it was in vain, for so long, unless less than that share of the tokens is expected.
TRY_AFTER_S = (0.25, 30.0)
TRY_FOR_S = 0.25
TRY_ABOVE = 0.85


@dataclass
class _Rest:
    """Of a drafter that was given up."""

    seconds: float = REST_S[0]
    until: float = -math.inf
    resumed: float = -math.inf  # when its drafts were taken up again


class Governor:
    """Chooses the plan of one drafter. The clock is the caller's: monotonic times, in seconds."""

    def __init__(self, max_drafts: int, *, is_adaptive: bool) -> None:
        """`max_drafts`: the number of drafts that is asked for at first, and always unless `is_adaptive`."""
        self.plan = Plan(max_drafts)
        self.is_adaptive = is_adaptive
        self._max_drafts = max_drafts
        self._rests: defaultdict[int, _Rest] = defaultdict(_Rest)  # by the scale of the load
        self._scale = 0  # of the last plan
        self._gains = 0  # plans at that scale, the last ones, for which drafts that are not asked for would have gained
        self._lost_s = 0.0  # by drafts, less what they have gained
        self._owed_s = 0.0  # the same, with what catching up lost over what is borne; of a drafter alone
        self._decided = math.inf  # when the last plan was made
        self._asked_nothing = False  # then
        self._pinged = -math.inf
        self._tried = -math.inf
        self._trial_every_s = math.inf  # what the budget allows; no end where drafts could not gain
        self._try_after_s = TRY_AFTER_S[0]
        self._trying_until = -math.inf

    @property
    def is_off(self) -> bool:
        """Whether drafts are slower than none."""
        return self.plan.num_drafts == 0

    @property
    def trial_drafts(self) -> int:
        """How many drafts a message asks for while the plan is to ask for none: all, of which most is seen."""
        return self._max_drafts

    def decide(
        self,
        now: float,
        forecast: Forecast,
        optimistic: Forecast | None = None,
        scale: int = 0,
        *,
        made: Made | None = None,
        asks_nothing: bool = False,
    ) -> None:
        """Takes up the plan that is fastest by far enough, or one that shows what another would take.

        Parameters
        ----------
        optimistic
            What would be expected if every draft were accepted: drafts that would not gain then are given up at once.
            By default nothing more than is.
        scale
            Of the load. A drafter that was given up rests while the load is of that scale.
        made
            What came since the last call, whatever the sequences were doing, of all drafters. Where that is not known,
            what is forecast for the time since then stands for it.
        asks_nothing
            Whether the drafter is asked for none at the moment, although the plan has drafts: where sequences have to
            catch up.
        """
        since_s, was_trying, self._decided = max(0.0, now - self._decided), self._decided < self._trying_until, now
        asked_nothing, self._asked_nothing = self._asked_nothing, asks_nothing
        is_catching_up = asks_nothing or asked_nothing
        if is_catching_up and now < self._trying_until:  # which shows nothing then
            self._trying_until, self._try_after_s = -math.inf, max(self._try_after_s / 2, TRY_AFTER_S[0])
        if now < self._trying_until and forecast.gain >= KEEP_ABOVE:
            return
        if is_catching_up:  # which no plan forecasts
            lost_s = 0.0 if made is None else (1 - BEAR_SHARE) * made.seconds - made.tokens / forecast.without_any
        elif was_trying and now >= self._trying_until:
            lost_s = 0.0  # what came up to the end of a trial is no plan's doing
        else:
            lost_s = self._lost_since(since_s, forecast, made)
        if scale != self._scale:
            self._scale, self._gains, self._lost_s = scale, 0, 0.0
        self._choose(now, lost_s, forecast, optimistic or forecast, self._rests[scale], is_catching_up=is_catching_up)
        together = Plan(self.plan.num_drafts)
        if self.plan == together:
            self._try_after_s = TRY_AFTER_S[0]
        elif (
            not asks_nothing
            and now > forecast.lead_seen + self._try_after_s
            and forecast.rate(together) > TRY_ABOVE * forecast.rate(self.plan)
        ):
            self.plan, self._trying_until = together, now + TRY_FOR_S
            self._try_after_s = min(2 * self._try_after_s, TRY_AFTER_S[1])

    def _lost_since(self, since_s: float, forecast: Forecast, made: Made | None) -> float:
        """Seconds of tokens without drafts that were lost in so long, negative where some were gained."""
        lost_s = (KEEP_ABOVE - forecast.rate(self.plan) / forecast.without) * since_s
        if made is None:
            return lost_s
        made_lost_s = KEEP_ABOVE * made.seconds - made.tokens / forecast.without_any
        # What several drafters lose together may be one's doing, and what they gain another's.
        return made_lost_s if forecast.is_alone else max(lost_s, made_lost_s)

    def _choose(
        self,
        now: float,
        lost_s: float,
        forecast: Forecast,
        optimistic: Forecast,
        rest: _Rest,
        *,
        is_catching_up: bool,
    ) -> None:
        if not self.is_adaptive:
            best = forecast.best(self._max_drafts)
            if forecast.rate(best) > BETTER_BY * forecast.rate(self.plan):
                self.plan = best
            return
        best = forecast.best()
        if not self.is_off and rest.resumed < rest.until <= now:
            rest.resumed = now  # they were taken up at another scale
        if self.is_off:
            self._gains = self._gains + 1 if forecast.gain > RESUME_ABOVE else 0
            if self._gains >= RESUME_AFTER and now >= rest.until:
                self.plan, rest.resumed = best, now
            return
        most_lost_s, most_owed_s = GIVE_UP_AFTER_STEPS * forecast.step_s, OWE_STEPS * forecast.step_s
        lost_s = max(-most_lost_s / 2, min(lost_s, most_lost_s / 2))  # there may have been no requests since
        if forecast.is_alone:
            self._owed_s = min(max(-most_lost_s, self._owed_s + lost_s), most_owed_s)
        if not is_catching_up:
            self._lost_s = max(-most_lost_s, self._lost_s + lost_s)
        owes_much = is_catching_up and lost_s > 0.0 and self._owed_s >= most_owed_s
        if now < rest.until:
            self._turn_off(now)
        elif self._lost_s >= most_lost_s or owes_much or optimistic.gain < KEEP_ABOVE:
            self._give_up(now, rest)
        elif forecast.rate(best) > BETTER_BY * forecast.rate(self.plan):
            self.plan = best

    def _give_up(self, now: float, rest: _Rest) -> None:
        relapsed = now < rest.resumed + RELAPSE_WITHIN * rest.seconds
        rest.seconds = min(max(2 * rest.seconds if relapsed else REST_S[0], self._owed_s / LOST_SHARE), REST_S[1])
        rest.until = now + rest.seconds
        self._turn_off(now)

    def _turn_off(self, now: float) -> None:
        self.plan, self._tried, self._pinged, self._gains, self._lost_s, self._owed_s = OFF, now, now, 0, 0.0, 0.0
        self._trying_until = -math.inf

    def allow_trials(self, optimistic: Forecast, stall_s: float) -> None:
        """Sets how often a sequence may wait for drafts that the plan does not ask for.

        Parameters
        ----------
        optimistic
            What is expected if every draft were accepted; where that gains nothing there are no trials.
        stall_s
            What a trial takes of the time of each of its sequences.
        """
        can_gain = optimistic.gain > RESUME_ABOVE
        self._trial_every_s = max(PING_EVERY_S, stall_s / TRIAL_SHARE) if can_gain else math.inf

    def is_ping_due(self, now: float) -> bool:
        """Whether a message is due to a drafter that is asked for nothing."""
        return now >= self._pinged + PING_EVERY_S

    def is_trial_due(self, now: float) -> bool:
        """Whether one is due whose answer may be waited for."""
        return self.is_ping_due(now) and now >= self._tried + self._trial_every_s

    def take_ping(self, now: float, *, is_trial: bool) -> None:
        """Notes that the message is sent."""
        self._pinged = now
        if is_trial:
            self._tried = now
