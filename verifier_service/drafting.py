"""The engine's side of drafting: which sequences draft where, what each drafter has been sent, what it answered."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from draftwire import config as cfg
from draftwire.errors import InvalidArgumentError
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.breaker import Breaker, Circuit
from verifier_service.core.batch import ScheduledRows
from verifier_service.draft_answer import decode_answer
from verifier_service.draft_session import LOST_AFTER_S, Binding, DraftSession, EarlyFeatures
from verifier_service.draft_stream import Answered, Connected, Disconnected, Draining, LinkEvent, Loaded, Stream
from verifier_service.early_features import begin_early
from verifier_service.fallbacks import Cause, bound_cause, unbound_cause
from verifier_service.features import FeatureKind, FeatureStore
from verifier_service.pacing import NUM_SCOUTS, Load, Message, Pace, Profile
from verifier_service.redraws import Audit
from verifier_service.request import ReadyDrafts, Request
from verifier_service.step_gate import StepGate
from verifier_service.step_sender import StepSender
from verifier_service.step_times import StepTimes

logger = logging.getLogger(__name__)

# Past so many bytes that are on their way unanswered the drafter counts as lost.
MAX_UNANSWERED_BYTES = 512 * 1024 * 1024
# What a sequence has at a drafter that is asked for nothing is kept until it is so many rows further.
MAX_PAUSED_ROWS = 256
# A sequence that a drafter could not take is offered again after this long, twice as long each time.
REOPEN_DELAY_S = (0.5, 30.0)

_STATES = {
    Circuit.CLOSED: generate_pb2.DRAFTER_STATE_READY,
    Circuit.OPEN: generate_pb2.DRAFTER_STATE_SLOW,
    Circuit.HALF_OPEN: generate_pb2.DRAFTER_STATE_PROBING,
}


class Drafting:
    """Binds requests to drafters, feeds their heads and collects drafts. Used by the engine's thread alone.

    Sequences stick to a drafter; a new one goes to where the least is taken. Nothing waits past the deadline: a drafter
    that misses it is late until it has answered everything, and in the meantime nobody waits for it. Where drafts are
    slower than none, a drafter is asked for none and sent next to nothing; see `pacing.governor`.

    Attributes
    ----------
    gate
        Decides who goes into the next step.
    """

    def __init__(
        self,
        config: config_pb2.SpeculativeConfig,
        vocab_size: int,
        deadline_s: float | None,
        device: torch.device,
        times: StepTimes,
        *,
        adaptive_k: bool | None = None,
        profile: Profile | None = None,
    ) -> None:
        """
        Parameters
        ----------
        deadline_s
            None waits until an answer comes or the drafter is lost.
        adaptive_k
            Whether fewer drafts than configured, or none, are asked for where that is faster. None: where there is a
            deadline and acceptance is not synthetic. Without a deadline every step has the drafts that were configured,
            so that a seed reproduces the output; and a benchmark of synthetic acceptance counts on them.
        profile
            Of the target's forward pass, where it has been measured.
        """
        self._config = config
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._device = device
        self._times = times
        self._sessions: dict[Stream, DraftSession] = {}
        self._bindings: dict[Request, Binding] = {}
        self._reopen: dict[Request, tuple[float, float]] = {}  # (not before, delay before that) s
        self._drafted: Counter[str] = Counter()  # drafts verified, by the drafter's address
        self._accepted: Counter[str] = Counter()
        self._audit = Audit(use_fp64=config.use_fp64_gumbel)  # by address too: a new stream forgets nothing
        self._expelled: set[Request] = set()  # whose drafter was expelled, until another takes them
        self._unlearnt: list[tuple[DraftSession, Message, Answered, bool]] = []
        is_synthetic = config.rejection_sample_method == cfg.SYNTHETIC
        self._is_adaptive = deadline_s is not None and not is_synthetic if adaptive_k is None else adaptive_k
        self.gate = StepGate(self._sessions, self._bindings, profile or Profile())
        self._sender = StepSender(config, times, self.gate)

    @property
    def sessions(self) -> Mapping[Stream, DraftSession]:
        """The connected drafters."""
        return self._sessions

    @property
    def feature_kinds(self) -> set[FeatureKind]:
        """What the connected heads take."""
        return {stream.head.kind for stream in self._sessions}

    def describe(self, status: generate_pb2.DrafterStatus) -> None:
        """Fills in what is known here of the drafter at the status' address; from any thread."""
        address = status.address
        status.sequences = self.sequences_at(address)
        status.drafted, status.accepted = self._drafted[address], self._accepted[address]
        session = next((one for one in list(self._sessions.values()) if one.stream.address == address), None)
        status.other_sequences = 0 if session is None else session.others
        status.kv_cache_usage = 0.0 if session is None else session.kv_cache_usage
        outlook = None if session is None else session.pace.outlook
        if outlook is not None:
            status.plan.CopyFrom(outlook)

    def sequences_at(self, address: str) -> int:
        """Sequences that draft at the drafter of that address."""
        return sum(len(s.bindings) for s in list(self._sessions.values()) if s.stream.address == address)

    def handle(self, event: LinkEvent) -> None:
        """Takes what happened on a stream."""
        if isinstance(event, Connected):
            ids = event.stream.head.draft_token_ids
            self._sessions[event.stream] = DraftSession(
                event.stream,
                None if ids is None else ids.to(self._device),
                Pace(
                    min(self._config.num_speculative_tokens, event.stream.head.max_drafts),
                    self._deadline_s,
                    is_adaptive=self._is_adaptive,
                ),
                Breaker(self._deadline_s, on_trial=event.stream.on_trial),
            )
        elif event.stream in self._sessions:
            session = self._sessions[event.stream]
            if isinstance(event, Answered):
                self._take_answer(session, event)
            elif isinstance(event, Loaded):
                session.take_load(event.load)
            elif isinstance(event, Draining):
                session.is_draining = True
            elif isinstance(event, Disconnected):
                self._drop(session)

    def next_deadline(self) -> float | None:
        """The earliest time at which something stops to wait, or a drafter counts as lost."""
        first = min([self.gate.next_deadline, *(session.lost_at for session in self._sessions.values())])
        return None if first == float("inf") else first

    def release(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._reopen.pop(request, None)
        self._sender.forget(request)
        self._expelled.discard(request)
        binding = self._bindings.pop(request, None)
        if binding is not None:
            self._close(binding)

    def drop_lost(self) -> None:
        """Gives up drafters that have not answered for long. To be called when all answers have been taken."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now > session.lost_at:
                self._give_up(session, f"no answer in {LOST_AFTER_S:g} s")

    def flush(
        self, requests: Sequence[Request], stores: dict[FeatureKind, FeatureStore], *, watches: bool = True
    ) -> None:
        """Sends every drafter the rows that it has not got, and asks for drafts where all rows are there.

        It also `watches` for drafters that are slow or have drained, unless answers may be there that were not taken.
        """
        self._learn()
        now = time.monotonic()
        if watches:
            self._leave_drained()
            self._watch_circuits(now)
        if len(self._bindings) < len(requests) and any(session.takes_more for session in self._sessions.values()):
            unbound = [one for one in requests if one.num_speculative_tokens > 0 and one not in self._bindings]
            for request in sorted(unbound, key=lambda one: one.num_feature_rows):  # the least is sent of the first
                self._bind(request, stores, now)
        for session in list(self._sessions.values()):
            store = stores[session.stream.head.kind]
            if session.is_draining:
                continue
            if session.pace.is_off:
                self._scout(session, store, requests, now)
            elif session.has_room:
                self._sender.send(session, store, now)
            elif not session.asks_nothing:  # else what is sent next asks for none
                self._hold(session, now)
            if session.unanswered_bytes > MAX_UNANSWERED_BYTES:
                self._give_up(session, f"more than {MAX_UNANSWERED_BYTES} bytes are unanswered")
        for session in self._sessions.values():
            session.give_up_early()
        self._sender.note_rows(requests)
        self._plan(requests, now)

    def announce(
        self,
        works: Sequence[ScheduledRows],
        drawn: torch.Tensor,
        stores: Mapping[FeatureKind, FeatureStore],
    ) -> dict[DraftSession, EarlyFeatures]:
        """Announce a step that was launched to the drafters of its requests; see `early_features`.

        The device puts the step's features where they are sent from, so that the step's message waits for nothing of
        the device. The tokens of `works` are `drawn`.
        """
        verified = {work.request: (place, work) for place, work in enumerate(works) if work.is_decoding}
        begun: dict[DraftSession, EarlyFeatures] = {}
        try:
            for session in self._sessions.values():
                if not session.is_draining and session.is_counted_on:
                    early = begin_early(session, stores[session.stream.head.kind], verified, drawn)
                    if early is not None:
                        begun[session] = early
        except BaseException:
            self.commit(begun)
            raise
        return begun

    def commit(self, begun: dict[DraftSession, EarlyFeatures]) -> None:
        """Take what `announce` returned of a step that is committed, for the next `flush`.

        All of it is taken out of `begun`: a step is kept for a while, and must not keep memory that is shared with a
        drafter that has gone.
        """
        while begun:
            session, early = begun.popitem()
            session.give_up_early()
            session.early = early
            if session.stream not in self._sessions:
                session.give_up_early()

    def _leave_drained(self) -> None:
        """Ends the streams of draining drafters that have answered everything; their sequences are free to move."""
        for session in list(self._sessions.values()):
            if session.is_draining and not session.unanswered:
                session.stream.end()
                self._drop(session)

    def _watch_circuits(self, now: float) -> None:
        """Lets time pass for drafters that are slow or on trial; sequences of those that are left alone may move."""
        for session in self._sessions.values():
            before = session.reported
            session.breaker.watch(session.silent_since, now)
            session.reported = session.breaker.circuit
            if session.reported is before or session.is_draining:
                continue
            session.stream.report(_STATES[session.reported])
            if session.breaker.is_open:
                for binding in list(session.bindings):
                    del self._bindings[binding.request]
                    self._close(binding)

    def _plan(self, requests: Sequence[Request], now: float) -> None:
        due = [session for session in self._sessions.values() if session.pace.is_due(now)]
        if due:
            expected = {one.stream.address: one.pace.acceptance.expected_tokens() for one in self._sessions.values()}
            output = self.gate.output(expected)
            for session in due:
                load = self._load(session, requests)
                session.pace.make_plan(now, load, self.gate.target_cost, output, expected)
                if not session.pace.is_off and self.gate.target_cost.wants_step_of(load.small_step, now):
                    # Its cost shows by one step without drafts, or by one of a part of the sequences.
                    if self._is_adaptive:
                        session.pace.skip_drafts()
                    else:
                        self.gate.part_next()

    def _load(self, session: DraftSession, requests: Sequence[Request]) -> Load:
        """What runs beside a session's sequences, which are those that it would get where it is asked for nothing."""
        decoding = [request for request in requests if request.is_decoding]
        own = sum(binding.request.is_decoding for binding in session.bindings)
        if session.pace.is_off:
            unbound = sum(one.num_speculative_tokens > 0 and one not in self._bindings for one in decoding)
            own += -(-unbound // len(self._sessions))
        rows = tokens = float(len(decoding) - own)
        joint_rows = joint_tokens = 0.0
        behind = num_together = 0
        for other in self._sessions.values():
            if other.is_late or other.pace.is_off:
                continue
            behind += sum(binding.request.is_decoding and binding.rows_behind > 0 for binding in other.bindings)
            if other is not session:
                num_together = len(decoding)
                count = sum(binding.request.is_decoding for binding in other.bindings)
                other_rows, other_tokens = other.pace.share_of_step(count)
                rows, tokens = rows + other_rows - count, tokens + other_tokens - count
                if other.pace.plan.num_groups == 1:
                    joint_rows, joint_tokens = joint_rows + other_rows, joint_tokens + other_tokens
        row_bytes, running, asks_nothing = session.stream.head.row_bytes, len(requests), session.asks_nothing
        return Load(own, row_bytes, rows, tokens, behind, running, asks_nothing, num_together, joint_rows, joint_tokens)

    def settle_costs(self) -> None:
        """Works in what has been learnt of costs, which the next use would wait for."""
        self.gate.target_cost.settle()
        for session in self._sessions.values():
            session.pace.cost.settle()

    def count_verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learns what became of a request's drafts."""
        binding = self._bindings.get(request)
        if binding is not None and num_drafts > 0 and num_accepted >= 0:
            session = binding.session
            session.pace.acceptance.count(num_drafts, num_accepted)
            self._drafted[session.stream.address] += num_drafts
            self._accepted[session.stream.address] += num_accepted

    def count_by_drafter(self, works: Sequence[ScheduledRows]) -> Counter[tuple[str, int]]:
        """How many decoding requests of a step have so many drafts, by (address of the drafter or "", drafts)."""
        bindings = self._bindings
        return Counter(
            (bindings[work.request].session.stream.address if work.request in bindings else "", work.num_drafts)
            for work in works
            if work.is_decoding
        )

    def is_bound(self, request: Request) -> bool:
        """Whether a request has a place at a drafter."""
        return request in self._bindings

    def held_back(self, works: Iterable[ScheduledRows]) -> set[Request] | None:
        """The requests of a step in flight that do not go on before it has landed, because they are to be sent to a
        drafter then. None where that is so of any whose drafts are counted on: all others stay together with those.

        Of a drafter that is asked for nothing these are a few, now and then, whom the others need not wait for.
        """
        now = time.monotonic()
        held: set[Request] = set()
        due = {one for one in self._sessions.values() if one.is_due(now)}
        places = {one: NUM_SCOUTS - len(one.bindings) for one in due if one.pace.is_off}
        trying = [one for one in places if self._may_ask(one) and one.pace.governor.is_trial_due(now)]
        tried = {scout.request for session in trying for scout in session.scouts if _can_be_tried(scout)}
        for work in works:
            request = work.request
            binding = self._bindings.get(request)
            if binding is not None and binding.session.is_counted_on:
                return None
            if binding is not None and (work.num_drafts > 0 or request in tried):
                held.add(request)
            if binding is None and due and request.num_speculative_tokens > 0:
                takers = [session for session in self._takers(request, now) if session in due]
                if any(session not in places for session in takers):
                    return None
                for session in [one for one in takers if places[one] > 0][:1]:
                    places[session] -= 1
                    held.add(request)
        return held

    def may_go_on(self, request: Request) -> bool:
        """Whether a prompt may go on before its last rows have landed: it has its place at a drafter, if it gets one,
        and its features are sent whatever goes on."""
        if request.num_speculative_tokens == 0 or request in self._bindings:
            return True
        now = time.monotonic()
        return not any(one.is_due(now) for one in self._takers(request, now))

    def fallback_cause(self, request: Request) -> Cause:
        """Why a decoding request goes without drafts into the step that was just scheduled."""
        if request.num_speculative_tokens == 0:
            return generate_pb2.FALLBACK_CAUSE_NOT_ASKED
        if request.num_drafts_wanted == 0:
            return generate_pb2.FALLBACK_CAUSE_LAST_TOKEN
        if request in self._bindings:
            return bound_cause(self._bindings[request])
        if request in self._expelled:
            return generate_pb2.FALLBACK_CAUSE_EXPELLED
        if self._sessions and time.monotonic() < self._reopen.get(request, (0.0, 0.0))[0]:
            return generate_pb2.FALLBACK_CAUSE_NOT_TAKEN
        return unbound_cause(request, self._sessions.values())

    def _bind(self, request: Request, stores: dict[FeatureKind, FeatureStore], now: float) -> None:
        if request.num_feature_rows == 0 or request.is_in_flight:
            return  # in flight: a store that was made since the step's launch has no features of its rows
        takers = self._takers(request, now)
        if not takers:
            return
        session = min(takers, key=lambda s: s.load)
        binding = Binding(request, session, stores[session.stream.head.kind].first_row(request))
        session.bindings.append(binding)
        self._bindings[request] = binding
        self._expelled.discard(request)

    def _takers(self, request: Request, now: float) -> list[DraftSession]:
        """Drafters that a request without one may get a place at."""
        if now < self._reopen.get(request, (0.0, 0.0))[0]:
            return []
        return [
            session
            for session in self._sessions.values()
            if session.takes_more and request.num_feature_rows <= session.stream.head.max_model_len
        ]

    def _hold(self, session: DraftSession, now: float) -> None:
        """The drafter has enough to do: its requests wait, within the deadline, until they can be sent."""
        until = now + session.pace.patience_s(session.pace.plan.num_drafts)
        for binding in session.bindings:
            request = binding.request
            wants_drafts = request.is_decoding and request.num_drafts_wanted > 0
            if wants_drafts and binding.asked_length != len(request.tokens) and binding.wait_until is None:
                binding.wait_until = until

    def _scout(self, session: DraftSession, store: FeatureStore, requests: Sequence[Request], now: float) -> None:
        """Now and then feeds a few sequences of a drafter that is asked for nothing, to see how far and good it is.

        How far shows by drafts that nobody waits for. How good they are shows where they are verified, for which a
        sequence stays out of the steps that are launched meanwhile. What they lack is sent before, so that they are
        asked for as those of all would be.
        """
        governor = session.pace.governor
        session.catches_up = session.asks_nothing = False
        if session.unanswered or not governor.is_ping_due(now):
            return
        if len(session.bindings) < NUM_SCOUTS and any(self._may_join(session, one, now) for one in requests):
            return  # the message stays due until the request has landed, and has its place
        scouts = session.scouts
        may_ask = self._may_ask(session)
        is_trial = may_ask and governor.is_trial_due(now) and any(map(_can_be_tried, scouts))
        if is_trial:
            scouts = [one for one in scouts if _can_be_tried(one) and not one.request.is_in_flight]
        if not (scouts or (session.closed_ids and not session.bindings)):
            return
        for binding in session.bindings[NUM_SCOUTS:]:
            if binding.rows_behind > MAX_PAUSED_ROWS:
                del self._bindings[binding.request]
                self._close(binding)
        num_drafts = governor.trial_drafts if may_ask else 0
        has_asked = self._sender.send_scouts(session, store, scouts, num_drafts, now, waits=is_trial)
        if may_ask:
            governor.take_ping(now, is_trial=is_trial and has_asked)
        session.has_caught_up = not may_ask and all(scout.rows_behind == 0 for scout in scouts)

    def _may_ask(self, session: DraftSession) -> bool:
        """Whether its scouts lack no more than a step brings, or have just been sent the rest."""
        return session.has_caught_up or all(map(self._sender.is_close, session.scouts))

    def _may_join(self, session: DraftSession, request: Request, now: float) -> bool:
        """Whether a request in flight gets a place there when it has landed."""
        is_free = request.num_speculative_tokens > 0 and request not in self._bindings
        return is_free and request.is_in_flight and session in self._takers(request, now)

    def _take_answer(self, session: DraftSession, answer: Answered) -> None:
        drafts = answer.drafts
        message = session.unanswered.get(drafts.step_id)
        if message is None:
            self._give_up(session, f"answered step {drafts.step_id}, which had no answer due", expel=True)
            return
        if not 0 <= drafts.compute_time_s < math.inf:
            self._give_up(session, f"computed for {drafts.compute_time_s} s", expel=True)
            return
        if len(drafts.sequence_ids) > message.rows:
            self._give_up(session, f"answered for more sequences than step {drafts.step_id} had rows", expel=True)
            return
        for step_id in [s for s in session.unanswered if s <= drafts.step_id]:
            del session.unanswered[step_id]
        if session.committed is not None and session.committed.step_id <= drafts.step_id:
            session.committed = None
        session.is_late = session.is_late and bool(session.unanswered)
        try:
            session.stream.take(drafts)
            self._store_drafts(session, drafts)
        except InvalidArgumentError as error:
            self._give_up(session, f"wrong answer: {error}", expel=True)
        for binding in session.bindings:
            if binding.asked_step <= drafts.step_id:
                binding.wait_until = None
        session.pace.note_answer(message, answer.received)
        self._unlearnt.append((session, message, answer, self.gate.ran_between(message.sent, answer.received)))

    def _learn(self) -> None:
        """Counts the answers, and learns what they tell of their drafters. Not as they come: a step may begin with
        their drafts."""
        for session, message, answer, is_beside in self._unlearnt:
            received, drafts = max(answer.received, message.sent), answer.drafts
            session.pace.take_answer(message, received, drafts.compute_time_s, is_beside=is_beside)
            if message.sequences:
                session.breaker.take_answer(received - max(message.sent, session.last_received), received)
            session.last_received = received
            session.take_load(drafts.load)
        self._unlearnt.clear()
        for stream in self._sessions:
            stream.count_received()

    def _store_drafts(self, session: DraftSession, answer: draft_pb2.Drafts) -> None:
        decoded = decode_answer(
            answer,
            self._config,
            self._vocab_size,
            session.stream.head.draft_vocab_size,
            session.draft_token_ids,
            session.stream.receiver,
        )
        tokens, logits = decoded.tokens, decoded.logits
        answered: list[tuple[Request, ReadyDrafts]] = []
        start = end = 0
        for sequence_id, status, committed_length, last_token, num_drafts in zip(*decoded[:5], strict=True):
            start, end = end, end + num_drafts
            binding = session.sequences.get(sequence_id)
            if binding is None:
                continue
            if status != draft_pb2.SEQUENCE_STATUS_OK:
                self._unbind(binding, time.monotonic())
            elif committed_length == binding.asked_length:
                if num_drafts > binding.asked_drafts:
                    raise InvalidArgumentError("drafts.num_drafts", num_drafts, f"{binding.asked_drafts} were asked")
                binding.wait_until = None
                request, known = binding.request, binding.request.tokens
                # Late where it is in flight: a step is about to add tokens, and with drafts it would seem ready.
                if request.num_in_flight == 0 and committed_length == len(known) and last_token == known[-1]:
                    drafts = ReadyDrafts(committed_length, last_token, tokens[start:end], logits, start)
                    answered.append((request, drafts))
        if logits is not None:
            self._times.count_logits(logits.carrier, len(tokens) * logits.row_bytes)
            address, is_on_trial = session.stream.address, session.breaker.is_on_trial
            belied = {id(drafts) for drafts in self._audit.find_unusable(address, answered, is_on_trial=is_on_trial)}
            answered = [(request, drafts) for request, drafts in answered if id(drafts) not in belied]
        for request, drafts in answered:
            request.drafts = drafts

    def _unbind(self, binding: Binding, now: float) -> None:
        """The drafter has no state of the sequence: it is opened anew after a while."""
        self._unlink(binding)
        del self._bindings[binding.request]
        if binding.session.is_draining:
            return  # others may take it at once
        _, delay = self._reopen.get(binding.request, (0.0, REOPEN_DELAY_S[0]))
        self._reopen[binding.request] = (now + delay, min(2 * delay, REOPEN_DELAY_S[1]))

    def _close(self, binding: Binding) -> None:
        """Leaves a request's place at its drafter, which drops what it has of it."""
        self._unlink(binding)
        if binding.sequence_id:
            binding.session.closed_ids.append(binding.sequence_id)

    def _unlink(self, binding: Binding) -> None:
        binding.session.bindings.remove(binding)
        binding.session.sequences.pop(binding.sequence_id, None)

    def _give_up(self, session: DraftSession, reason: str, *, expel: bool = False) -> None:
        session.stream.fail(reason, expel=expel)
        if expel:
            self._expelled.update(binding.request for binding in session.bindings)
        self._drop(session)

    def _drop(self, session: DraftSession) -> None:
        self._sessions.pop(session.stream, None)
        for other in self._sessions.values():
            other.pace.pause()
        session.stream.count_received()
        session.committed = None  # it keeps the session, as early features do, and with it memory that is shared
        session.give_up_early()
        for binding in session.bindings:
            del self._bindings[binding.request]
        session.bindings.clear()
        session.sequences.clear()


def _can_be_tried(scout: Binding) -> bool:
    """Whether its drafts can be verified, when the step that it may be in has landed."""
    request = scout.request
    return request.is_decoding and request.num_drafts_wanted > 0 and scout.rows_behind <= MAX_PAUSED_ROWS
