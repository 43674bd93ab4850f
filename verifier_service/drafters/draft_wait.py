"""The wait for drafts: which requests wait, for how long, and whether a step waits for drafts that arrive soon."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from verifier_service.core.request import Request
from verifier_service.drafters.session import AwaitedAnswer, Binding, DraftSession
from verifier_service.drafters.stream import Stream

logger = logging.getLogger(__name__)

# Smoothing factor of the seconds of a step.
SMOOTH = 1 / 16


class DraftWaitPolicy:
    """Decides which requests wait for drafts, and for how long. Only the engine's thread uses it.

    Attributes:
        step_s: Smoothed seconds of a step without prompts, excluding waits; NaN before the first.
    """

    def __init__(self, sessions: Mapping[Stream, DraftSession], bindings: Mapping[Request, Binding]) -> None:
        """`sessions` and `bindings` are those of `Placement`, which changes them."""
        self.step_s = math.nan
        self._sessions = sessions
        self._bindings = bindings
        self._held_since: float | None = None
        self._held_until: float | None = None

    def count_step(self, seconds: float) -> None:
        """Count the seconds of a step without prompts."""
        self.step_s = seconds if math.isnan(self.step_s) else self.step_s + SMOOTH * (seconds - self.step_s)

    def is_ready(self, request: Request) -> bool:
        """Return whether a decoding request may join the next step: it has its drafts or does not wait for any."""
        binding = self._bindings.get(request)
        if binding is None or request.drafts is not None or binding.wait_until is None or binding.session.is_late:
            return True
        if time.monotonic() < binding.wait_until:
            return False
        session = binding.session
        session.is_late = True
        # With adaptive k waits are short, and often end without drafts.
        level = logging.DEBUG if session.pace.is_adaptive else logging.WARNING
        logger.log(level, "drafter %s: missed the draft deadline", session.stream.address)
        return True

    def may_run_beside(self, request: Request, drafted: Iterable[Request]) -> bool:
        """Return whether a request may join a step that is launched while a step with drafts of `drafted` runs.

        It may not if both have drafts of one drafter, because that drafter's sequences would stay split over two steps.
        """
        binding = self._bindings.get(request)
        if binding is None or request.drafts is None:
            return True
        others = (self._bindings.get(other) for other in drafted)
        return all(other is None or other.session is not binding.session for other in others)

    def come_soon(self, running: Iterable[Request]) -> bool:
        """Return whether requests of the running step are expected to get drafts within one step's time after it."""
        bindings = (self._bindings.get(one) for one in running if one.num_drafts_wanted > 0)
        sessions = {one.session for one in bindings if one is not None and one.rows_behind == 0}
        return any(one.has_room and one.pace.num_drafts > 0 and one.pace.answer_s < self.step_s for one in sessions)

    def is_waiting(self, request: Request) -> bool:
        """Return whether a request waits for drafts."""
        binding = self._bindings.get(request)
        return binding is not None and binding.is_waiting

    @property
    def is_awaited(self) -> bool:
        """Return whether any request waits for drafts."""
        return any(binding.is_waiting for binding in self._bindings.values())

    def all_wait(self, requests: Sequence[Request]) -> bool:
        """Return whether all requests wait for drafts, so that no step can be scheduled; false without requests."""
        now, bindings = time.monotonic(), self._bindings
        for request in requests:
            binding = bindings.get(request)
            if binding is None or request.drafts is not None or not binding.waits_at(now):
                return False
        return len(requests) > 0

    def awaited_answer(self) -> AwaitedAnswer | None:
        """Return the answer with all awaited drafts; None if there are several or none."""
        sessions = [session for session in self._sessions.values() if session.unanswered]
        if len(sessions) != 1 or sessions[0].is_late:
            return None
        return sessions[0].awaited_answer()

    def expected_drafts(self, requests: Sequence[Request]) -> list[int] | None:
        """Return the maximum number of drafts of each request in the next step, if that step has all requests and waits
        for drafts; else None."""
        counts = []
        is_awaited = False
        for request in requests:
            binding = self._bindings.get(request)
            if request.num_in_flight or not request.is_decoding:
                return None
            if request.drafts is not None:
                counts.append(len(request.drafts.tokens))
            elif binding is not None and binding.is_waiting:
                is_awaited = True
                # With a full drafter, drafts were last requested when the request had fewer tokens.
                counts.append(min(binding.asked_drafts, request.num_drafts_wanted))
            else:
                counts.append(0)
        return counts if is_awaited else None

    @property
    def next_deadline(self) -> float:
        """Return the earliest monotonic time at which a request or a held step stops waiting; infinite without one."""
        waits = (binding.wait_until for binding in self._bindings.values() if not binding.session.is_late)
        first = min((until for until in waits if until is not None), default=math.inf)
        return first if self._held_until is None else min(first, self._held_until)

    def is_held(self, requests: Sequence[Request], *, may_admit: bool) -> bool:
        """Return whether the next step waits for drafts that arrive soon, so that one step replaces two.

        `may_admit`: whether the step may admit a waiting request.
        """
        now = time.monotonic()
        num_ready, has_prompts, is_waiting = 0, may_admit, False
        for request in requests:
            binding = self._bindings.get(request)
            if binding is not None and request.drafts is None and binding.waits_at(now):
                is_waiting = True
            elif request.is_decoding:
                num_ready += 1
            else:
                has_prompts = True
        self._held_until = self.hold_until(now, num_ready) if is_waiting else None
        if self._held_until is None:
            self._held_since = None
            return False
        if num_ready > 0 or has_prompts:  # else the wait delays no request
            self._held_since = now if self._held_since is None else self._held_since
        return True

    def hold_until(self, now: float, num_ready: int) -> float | None:
        """Return the time until which a step of the ready requests waits; None if it does not wait.

        Waiting costs each ready request the wait. Not waiting costs each request whose drafts arrive soon one step.
        Drafts that are overdue by a time are expected to take the same time again.
        """
        latest = (now if self._held_since is None else self._held_since) + self.step_s
        messages = [
            (abs(message.sent + session.pace.answer_s - now), message)
            for session in self._sessions.values()
            if not session.is_late
            for message in session.unanswered.values()
            if message.sequences > 0 and now < message.wait_until
        ]
        until, num_awaited = None, 0
        for wait_s, message in sorted(messages, key=lambda one: one[0]):
            num_awaited += message.sequences
            longest_s = min(self.step_s, self.step_s * num_awaited / max(num_ready, 1))
            if wait_s < longest_s and now < latest:  # false for NaN
                until = min(message.wait_until, latest, now + longest_s)
        return until
