"""The places of requests at drafters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from draftwire.v1 import generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.drafters.breaker import Circuit
from verifier_service.drafters.fallbacks import Cause, bound_cause, session_cause, unbound_cause
from verifier_service.drafters.features import FeatureKind, FeatureStore
from verifier_service.drafters.session import LOST_AFTER_S, Binding, DraftSession
from verifier_service.drafters.stream import Stream

# A sequence that a drafter rejected is offered to this drafter again after the first delay, and to others at once. Each
# further delay doubles, up to the second.
REOPEN_DELAY_S = (0.5, 30.0)
# While no drafts are requested from a drafter, a sequence keeps its place until it lacks more than this many rows.
MAX_PAUSED_ROWS = 256

_STATES = {
    Circuit.CLOSED: generate_pb2.DRAFTER_STATE_READY,
    Circuit.OPEN: generate_pb2.DRAFTER_STATE_SLOW,
    Circuit.HALF_OPEN: generate_pb2.DRAFTER_STATE_PROBING,
}


class Placement:
    """Gives requests their places at drafters. Only the engine's thread uses it.

    A request stays at its drafter. A new request goes to the drafter with the lowest share of places taken. With its
    place a request loses the drafts that it has not verified: they would be taken for those of its next drafter.

    Attributes:
        sessions: The connected drafters, by stream.
        bindings: The place of each request at a drafter.
    """

    def __init__(self) -> None:
        self.sessions: dict[Stream, DraftSession] = {}
        self.bindings: dict[Request, Binding] = {}
        # By the address of each drafter that rejected the request: earliest monotonic time, and the delay before it.
        self._reopen: dict[Request, dict[str, tuple[float, float]]] = {}
        self._expelled: set[Request] = set()  # requests of expelled drafters, until another drafter takes them

    def sequences_at(self, address: str) -> int:
        """Return the number of sequences at the drafter with this address; thread-safe."""
        return sum(len(s.bindings) for s in list(self.sessions.values()) if s.stream.address == address)

    def is_bound(self, request: Request) -> bool:
        """Return whether a request has a place at a drafter."""
        return request in self.bindings

    def may_decode_ahead(self, requests: Iterable[Request]) -> bool:
        """Return whether the requests of a running step may continue before its tokens are known.

        They may not if any of them is about to send rows to a drafter: all requests continue or none, so that they stay
        in one batch.
        """
        if not any(session.is_counted_on or session.takes_more for session in self.sessions.values()):
            return True
        now = time.monotonic()
        for request in requests:
            binding = self.bindings.get(request)
            if binding is not None and binding.session.is_counted_on:
                return False
            if binding is None and request.num_speculative_tokens > 0 and self._takers(request, now):
                return False
        return True

    def may_prefill_ahead(self, request: Request) -> bool:
        """Return whether a prompt may continue while its last rows are still running.

        A prompt that can get a place at a drafter gets the place first.
        """
        if request.num_speculative_tokens == 0 or request in self.bindings:
            return True
        return not self._takers(request, time.monotonic())

    def note_causes(self, rows: Iterable[ScheduledRows]) -> None:
        """Record in decoding requests' rows without drafts why they have none, unless it is recorded."""
        bare = [row for row in rows if row.is_decoding and row.num_drafts == 0 and row.cause is None]
        for row, cause in zip(bare, self.fallback_causes([row.request for row in bare]), strict=True):
            row.cause = cause

    def fallback_causes(self, requests: Sequence[Request]) -> list[Cause]:
        """Return why decoding requests have no drafts in the step that was just scheduled."""
        if not requests:
            return []
        # Most requests of a drafter, or without one, have one cause.
        session_causes = {session: session_cause(session) for session in self.sessions.values()}
        fitting_rows = min((session.stream.head.max_model_len for session in self.sessions.values()), default=0)
        fitting_cause = unbound_cause(fitting_rows, self.sessions.values())
        return [self._fallback_cause(request, session_causes, fitting_rows, fitting_cause) for request in requests]

    def _fallback_cause(
        self,
        request: Request,
        session_causes: Mapping[DraftSession, Cause | None],
        fitting_rows: int,
        fitting_cause: Cause,
    ) -> Cause:
        """`fitting_cause` is that of requests with at most `fitting_rows` feature rows and without a place."""
        if request.num_speculative_tokens == 0:
            return generate_pb2.FALLBACK_CAUSE_NOT_ASKED
        if request.num_drafts_wanted == 0:
            return generate_pb2.FALLBACK_CAUSE_LAST_TOKEN
        binding = self.bindings.get(request)
        if binding is not None:
            cause = session_causes[binding.session]
            return bound_cause(binding) if cause is None else cause
        if request in self._expelled:
            return generate_pb2.FALLBACK_CAUSE_EXPELLED
        if request in self._reopen:
            now = time.monotonic()
            if any(self._is_rejected(request, session, now) for session in self.sessions.values()):
                return generate_pb2.FALLBACK_CAUSE_NOT_TAKEN
        num_rows = request.num_feature_rows
        return fitting_cause if num_rows <= fitting_rows else unbound_cause(num_rows, self.sessions.values())

    def place(self, requests: Sequence[Request], stores: Mapping[FeatureKind, FeatureStore], now: float) -> None:
        """Give places to requests with drafts that have no drafter."""
        if len(self.bindings) >= len(requests) or not any(session.takes_more for session in self.sessions.values()):
            return
        unbound = [one for one in requests if one.num_speculative_tokens > 0 and one not in self.bindings]
        for request in sorted(unbound, key=lambda one: one.num_feature_rows):  # short sequences send the fewest rows
            self._bind(request, stores, now)

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._reopen.pop(request, None)
        self._expelled.discard(request)
        if request in self.bindings:
            self._close(self.bindings[request])

    def unbind(self, binding: Binding) -> None:
        """Remove a place whose drafter has no state of the sequence; the sequence is opened again after a delay."""
        self._unlink(binding)
        if binding.session.is_draining:
            return  # another drafter may take the sequence at once
        delays, address = self._reopen.setdefault(binding.request, {}), binding.session.stream.address
        _, delay = delays.get(address, (0.0, REOPEN_DELAY_S[0]))
        delays[address] = time.monotonic() + delay, min(2 * delay, REOPEN_DELAY_S[1])

    def leave_behind(self, session: DraftSession) -> None:
        """Close sequences with a long backlog at a drafter from which no drafts are requested."""
        session.catches_up = False
        for binding in [one for one in session.bindings if one.rows_behind > MAX_PAUSED_ROWS]:
            self._close(binding)

    def leave_drained(self) -> None:
        """End the streams of draining drafters that have answered every step, so that their sequences can move."""
        for session in list(self.sessions.values()):
            if session.is_draining and not session.unanswered:
                session.stream.end()
                self.drop(session)

    def watch_circuits(self, now: float) -> None:
        """Update the breakers of all drafters, and move the sequences away from drafters that are too slow."""
        for session in self.sessions.values():
            before = session.reported
            session.breaker.watch(session.silent_since, now)
            session.reported = session.breaker.circuit
            if session.reported is before or session.is_draining:
                continue
            session.stream.report(_STATES[session.reported])
            if session.breaker.is_open:
                for binding in list(session.bindings):
                    self._close(binding)

    def drop_lost(self) -> None:
        """Give up drafters that have not answered for `LOST_AFTER_S`. Call after all answers have been processed."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if now > session.lost_at:
                self.give_up(session, f"no answer in {LOST_AFTER_S:g} s")

    def give_up(self, session: DraftSession, reason: str, *, expel: bool = False) -> None:
        """End a drafter's stream with an error, and remove its session."""
        session.stream.fail(reason, expel=expel)
        self.drop(session)

    def drop(self, session: DraftSession) -> None:
        """Remove a session whose stream has ended, and the places of its requests."""
        self.sessions.pop(session.stream, None)
        session.stream.count_received()
        session.committed = None  # like early features, it keeps the session and its shared memory alive
        session.give_up_early()
        for binding in session.bindings:
            del self.bindings[binding.request]
            binding.request.drafts = None
            if session.stream.is_expelled:
                self._expelled.add(binding.request)
        session.bindings.clear()
        session.sequences.clear()

    def _takers(self, request: Request, now: float) -> list[DraftSession]:
        """Return the drafters at which a request may get a place now."""
        return [
            session
            for session in self.sessions.values()
            if session.takes_more
            and request.num_feature_rows <= session.stream.head.max_model_len
            and not self._is_rejected(request, session, now)
        ]

    def _is_rejected(self, request: Request, session: DraftSession, now: float) -> bool:
        """Return whether a request waits until it is offered to a drafter again."""
        delays = self._reopen.get(request)
        return delays is not None and now < delays.get(session.stream.address, (0.0, 0.0))[0]

    def _bind(self, request: Request, stores: Mapping[FeatureKind, FeatureStore], now: float) -> None:
        if request.num_feature_rows == 0 or request.is_in_flight:
            return  # in flight: a store created after the step's launch has no features of its rows
        takers = self._takers(request, now)
        if not takers:
            return
        session = min(takers, key=lambda s: s.load)
        binding = Binding(request, session, stores[session.stream.head.kind].first_row(request))
        session.bindings.append(binding)
        self.bindings[request] = binding
        self._expelled.discard(request)

    def _close(self, binding: Binding) -> None:
        """Remove a request's place, and let the drafter drop its state of the sequence."""
        self._unlink(binding)
        if binding.sequence_id:
            binding.session.closed_ids.append(binding.sequence_id)

    def _unlink(self, binding: Binding) -> None:
        del self.bindings[binding.request]
        binding.request.drafts = None
        binding.session.bindings.remove(binding)
        binding.session.sequences.pop(binding.sequence_id, None)
