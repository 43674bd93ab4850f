"""Who goes into the next step, and when it runs: requests wait for their drafts, and steps for each other."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from verifier_service.draft_session import AwaitedAnswer, Binding, DraftSession
from verifier_service.draft_stream import Stream
from verifier_service.pacing import CopyLimit, Expected, Group, Output, Profile, TargetCost, hold_until
from verifier_service.request import Request

logger = logging.getLogger(__name__)

# A step that waited for no drafts, and before which the host sent no rows of prompts, was held up by something that has
# nothing to do with drafts if it took so many times what is expected. Steps with drafts may have waited for them.
STALLED_ABOVE = 1.5


class StepGate:
    """Used by the engine's thread alone. It reads the sessions and bindings that `Drafting` keeps."""

    def __init__(
        self, sessions: Mapping[Stream, DraftSession], bindings: Mapping[Request, Binding], profile: Profile
    ) -> None:
        self.target_cost = TargetCost(profile)
        self.copy_limit = CopyLimit()
        self._sessions = sessions
        self._bindings = bindings
        self._launched: deque[float] = deque()  # when the steps that run were; monotonic times
        self._ran_until = -math.inf  # when the last of those that have ended did
        self._feature_rows = 0  # sent since the last step was counted
        self._sent_histories = False  # since the last step but one was
        self._sends_histories = False  # since the last step was
        self._had_prompts = False  # whether that had any
        self._landed: float | None = None  # when its tokens were there
        self._verified: Counter[tuple[str, int]] = Counter()  # see `Output`
        self._steps = 0
        self._seconds = 0.0
        self._deferred: set[Request] = set()  # whose drafts are there and who leave the next step to others
        self._parts = False  # whether the next step is to take a part of those that are ready
        self._held_since: float | None = None
        self._held_until: float | None = None

    def note_launch(self) -> None:
        """Notes that a step runs."""
        self._launched.append(time.monotonic())

    def note_landing(self) -> None:
        """Notes that the step that was launched first has ended."""
        self._launched.popleft()
        self._ran_until = time.monotonic()

    def ran_between(self, begin: float, end: float) -> bool:
        """Whether a step ran between two monotonic times, of which the first is after the last landing but one."""
        return self._ran_until > begin or (bool(self._launched) and self._launched[0] < end)

    def count_sent(self, feature_rows: int, *, has_histories: bool, copied_bytes: int = 0) -> None:
        """Notes rows that the drafters were sent, which take some of the engine's time; those of prompts and histories
        take more of it than a plan would, where so many bytes of them are copied."""
        self._feature_rows += feature_rows
        self._sends_histories |= has_histories
        if has_histories:
            self.copy_limit.count_sent(copied_bytes)

    def count_step(
        self,
        rows: int,
        *,
        has_prompts: bool,
        is_delayed: bool = False,
        step_s: float,
        host_s: float,
        verified: Mapping[tuple[str, int], int] = MappingProxyType({}),
        landed: float = 0.0,
        is_beside: bool | None = None,
    ) -> None:
        """Learns what a step has cost and brought.

        Parameters
        ----------
        rows
            Of all its requests; the time of rows of prompts is of another kind and left out.
        is_delayed
            Whether the host launched a step with prompts before it took this one's tokens. That takes longer than a
            step without, and is no part of what this one took.
        step_s, host_s
            Time of the step itself and of the host before it, waits left out; see `StepTimes`. Behind a step with
            prompts the host also sends their features and opens their sequences, which no plan changes.
        verified
            How many decoding requests it had, by the address of their drafter ("" for none) and their drafts.
        landed
            Monotonic time at which its tokens were there.
        is_beside
            Whether it was launched while another step ran. None where none ever is: the host's time is the step's then,
            and so is that for rows sent before it.
        """
        has_drafts = any(drafts for _, drafts in verified)
        is_busy = self._had_prompts or is_delayed or self._sent_histories or self._sends_histories
        if self._landed is not None and not (has_prompts or self._had_prompts or is_delayed):
            seconds = landed - self._landed
            is_free = is_beside and not has_drafts and not is_busy
            if not (is_free and self._is_stall(rows, seconds)):
                self._seconds += seconds
                self._verified.update(verified)
                self._steps += 1
        if is_beside and not (has_drafts or has_prompts or self._had_prompts or is_delayed):
            self.copy_limit.count_step(step_s, host_s - self.target_cost.beside_s)
        else:
            self.copy_limit.skip_step()
        if not has_prompts:
            self._learn(rows, step_s, host_s, verified, is_beside, has_drafts=has_drafts, is_busy=is_busy)
        self._feature_rows = 0
        self._sent_histories, self._sends_histories = self._sends_histories, False
        self._had_prompts, self._landed = has_prompts, landed

    def output(self, drafters: Collection[str]) -> Output:
        """What steps have brought that had no prompts and followed another without, but for those that were held up by
        something else. What drafts of others than the drafters at these addresses have brought is forgotten."""
        for key in [key for key in self._verified if key[0] not in drafters and key[0]]:
            del self._verified[key]
        return Output(self._verified.copy(), self._steps, self._seconds)

    def _is_stall(self, rows: int, seconds: float) -> bool:
        """Whether a step of so many rows that waited for nothing took much longer than it does as a rule."""
        cost = self.target_cost
        return cost.is_known and seconds > STALLED_ABOVE * (cost.seconds(rows) + cost.beside_s)

    def _learn(
        self,
        rows: int,
        step_s: float,
        host_s: float,
        verified: Mapping[tuple[str, int], int],
        is_beside: bool | None,
        *,
        has_drafts: bool,
        is_busy: bool,
    ) -> None:
        """`is_busy`: the host had other things to do before it than drafts."""
        cost, now = self.target_cost, time.monotonic()
        if is_beside is None:
            cost.observe(rows, self._feature_rows, step_s + host_s, now)
            return
        take_turns = any(session.pace.plan.num_groups > 1 for session in self._sessions.values())
        is_turn = take_turns and is_beside and has_drafts and cost.is_known
        if not is_turn:
            cost.observe(rows, 0, step_s, now)
        if is_busy:
            return
        # A part of the sequences that finds nothing running shows less than all, or is out of step with the others; and
        # one with drafts that goes beside another step was waited for.
        is_whole = not take_turns and 4 * sum(verified.values()) >= 3 * len(self._bindings)
        shows_host = not has_drafts if is_beside else is_whole
        if is_turn:
            cost.observe_turn(rows, step_s, host_s, now)
        elif shows_host:
            cost.observe_host(host_s, now, is_beside=is_beside)

    def part_next(self) -> None:
        """Has the next step take a part of those that are ready, so that its cost shows."""
        self._parts = True

    def is_ready(self, request: Request) -> bool:
        """Whether a decoding request goes into the next step: it has its drafts or does not wait for any."""
        if request in self._deferred:
            return False
        binding = self._bindings.get(request)
        if binding is None or request.drafts is not None or binding.wait_until is None or binding.session.is_late:
            return True
        if time.monotonic() < binding.wait_until:
            return False
        session = binding.session
        session.is_late = True
        # Where the number of drafts adapts, the wait is short and ends often.
        level = logging.DEBUG if session.pace.governor.is_adaptive else logging.WARNING
        logger.log(level, "drafter %s: missed the draft deadline", session.stream.address)
        return True

    def takes_turns(self, request: Request, drafted: Iterable[Request]) -> bool:
        """Whether a request may go into a step while one is in flight that verifies drafts of `drafted`: not with
        drafts of the same drafter where one group is faster, which they would never be again."""
        binding = self._bindings.get(request)
        if binding is None or request.drafts is None or binding.session.pace.plan.num_groups > 1:
            return True
        others = (self._bindings.get(other) for other in drafted)
        return all(other is None or other.session is not binding.session for other in others)

    def has_groups(self, request: Request) -> bool:
        """Whether the sequences of its drafter take turns."""
        binding = self._bindings.get(request)
        return binding is not None and binding.session.pace.plan.num_groups > 1

    def come_soon(self, flying: Iterable[Request]) -> bool:
        """Whether some of those in flight should have drafts so soon after they have landed that the next step gains by
        being theirs too: within a step's fixed time, which is what `pacing.grouping` has steps wait."""
        drafting = (self._bindings.get(one) for one in flying if one.num_drafts_wanted > 0)
        sequences = Counter(one.session for one in drafting if one is not None and one.rows_behind == 0)
        return self.target_cost.is_known and any(
            session.has_room and session.pace.answer_s(count, session.stream.head.row_bytes) < self.target_cost.fixed
            for session, count in sequences.items()
        )

    def is_waiting(self, request: Request) -> bool:
        """Whether a request waits for drafts."""
        binding = self._bindings.get(request)
        return binding is not None and binding.is_waiting

    @property
    def is_awaited(self) -> bool:
        """Whether any request does."""
        return any(binding.is_waiting for binding in self._bindings.values())

    @property
    def is_counted_on(self) -> bool:
        """Whether any request waits for drafts of a drafter that is not just looked after."""
        return any(binding.is_waiting and not binding.session.pace.is_off for binding in self._bindings.values())

    def all_wait(self, requests: Sequence[Request]) -> bool:
        """Whether there are requests and each of them waits for drafts, so that no step can be scheduled."""
        now, bindings = time.monotonic(), self._bindings
        for request in requests:
            binding = bindings.get(request)
            if binding is None or request.drafts is not None or not binding.waits_at(now):
                return False
        return len(requests) > 0

    def awaited_answer(self) -> AwaitedAnswer | None:
        """The answer that brings all drafts that are waited for; None when it takes several, or none will."""
        sessions = [session for session in self._sessions.values() if session.unanswered]
        if len(sessions) != 1 or sessions[0].is_late:
            return None
        return sessions[0].awaited_answer()

    def expected_drafts(self, requests: Sequence[Request]) -> list[int] | None:
        """How many drafts each request brings to the next step, at most, if that step waits for drafts and is one of
        them all; else None."""
        counts = []
        num_bound = 0
        sessions: set[DraftSession] = set()
        awaited: set[DraftSession] = set()
        for request in requests:
            binding = self._bindings.get(request)
            if request.num_in_flight or not request.is_decoding:
                return None
            if binding is not None:
                sessions.add(binding.session)
                num_bound += 1
            if request.drafts is not None:
                counts.append(len(request.drafts.tokens))
            elif binding is not None and binding.is_waiting:
                awaited.add(binding.session)
                # One that waits for its drafter to take more was asked last when it had fewer tokens.
                counts.append(min(binding.asked_drafts, request.num_drafts_wanted))
            else:
                counts.append(0)
        take_turns = any(session.pace.plan.num_groups > 1 for session in awaited)
        parts = self._parts and len(sessions) < num_bound
        return counts if awaited and not take_turns and not parts else None

    @property
    def next_deadline(self) -> float:
        """The earliest time at which a waiting request or a held step stops to wait; infinite if there is none."""
        waits = (binding.wait_until for binding in self._bindings.values() if not binding.session.is_late)
        first = min((until for until in waits if until is not None), default=math.inf)
        return first if self._held_until is None else min(first, self._held_until)

    def is_held(self, requests: Sequence[Request], *, has_launched: bool, may_admit: bool) -> bool:
        """Whether the next step waits a moment for drafts, so that one step does for two; see `pacing.grouping`.

        Where sequences take turns, it also decides who leaves the step to others.

        Parameters
        ----------
        has_launched
            Whether there is a step that the engine has launched. Else it would launch one that waits for drafts, if
            that is one of all.
        may_admit
            Whether a request that is not among `requests` may begin in the step.
        """
        now = time.monotonic()
        self._held_until = None
        self._deferred.clear()
        is_waiting, has_prompts = False, may_admit
        num_undrafted = 0
        drafted: dict[DraftSession, list[Binding]] = {}
        for request in requests:
            binding = self._bindings.get(request)
            if binding is not None and request.drafts is not None:
                drafted.setdefault(binding.session, []).append(binding)
            elif binding is not None and binding.waits_at(now):
                is_waiting = True
            elif request.is_decoding:
                num_undrafted += 1
            else:
                has_prompts = True
        has_ready = num_undrafted > 0 or bool(drafted)
        self._take_turns(drafted)
        if is_waiting and not self._deferred:
            launches_meanwhile = not (has_launched or may_admit)
            is_hidden = launches_meanwhile and has_ready and self.expected_drafts(requests) is not None
            lead_s = self.target_cost.lead_s if is_hidden else 0.0
            self._held_until = self._hold_until(now, drafted, num_undrafted, lead_s)
        if self._held_until is None:
            self._held_since = None
            return False
        if has_ready or has_prompts:  # else nothing has waited yet
            self._held_since = now if self._held_since is None else self._held_since
        return True

    def _take_turns(self, drafted: dict[DraftSession, list[Binding]]) -> None:
        """Parts sequences that are ready at once into the groups of the plan, the longest ready first."""
        for session, bindings in drafted.items():
            size = session.pace.group_size(len(session.bindings))
            if self._parts:
                size = min(size, len(bindings) // 2)
            # A few over wait for the next group, which is that much smaller: steps of equal size take the least time.
            if 0 < size < len(bindings):
                bindings.sort(key=lambda binding: binding.asked_step)
                self._deferred.update(binding.request for binding in bindings[size:])
        self._parts = self._parts and not self._deferred

    def _hold_until(
        self, now: float, drafted: dict[DraftSession, list[Binding]], num_undrafted: int, lead_s: float
    ) -> float | None:
        cost = self.target_cost
        latest = (now if self._held_since is None else self._held_since) + cost.fixed
        if not cost.is_known or now >= latest:
            return None
        rows, tokens = num_undrafted, float(num_undrafted)
        for session, bindings in drafted.items():
            rows += sum(1 + binding.asked_drafts for binding in bindings)
            tokens += len(bindings) * session.pace.acceptance.expected_tokens()[bindings[0].asked_drafts]
        expected: list[Expected] = []
        for session in self._sessions.values():
            # Groups that take turns stay apart once they are full.
            pace, num_ready = session.pace, len(drafted.get(session, ()))
            is_full = pace.plan.num_groups > 1 and 1.5 * num_ready > pace.group_size(len(session.bindings))
            if not session.is_late and not is_full:
                # Those of a drafter with one group do not go beside others of it; see `takes_turns`.
                joins = num_ready > 0 and pace.plan.num_groups == 1
                redraft_s = pace.answer_s(num_ready, session.stream.head.row_bytes) if joins else math.inf
                groups = (pace.expect(message, redraft_s) for message in session.unanswered.values())
                expected += [group for group in groups if group is not None]
        undrafted = Group(num_undrafted, float(num_undrafted))
        until = hold_until(now, Group(rows, tokens), undrafted, expected, cost, lead_s)
        return None if until is None else min(until, latest)
