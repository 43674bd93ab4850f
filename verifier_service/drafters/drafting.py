"""The engine's side of drafting: which sequences draft where, what each drafter has been sent, what it answered."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from draftwire.contract import validation as cfg
from draftwire.contract.errors import InvalidArgumentError
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.core.step_times import StepTimes
from verifier_service.drafters.answers import decode_answer
from verifier_service.drafters.audit import Audit
from verifier_service.drafters.breaker import Breaker, Circuit
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.drafters.early_features import begin_early
from verifier_service.drafters.fallbacks import Cause, bound_cause, unbound_cause
from verifier_service.drafters.features import FeatureKind, FeatureStore
from verifier_service.drafters.sender import StepSender
from verifier_service.drafters.session import LOST_AFTER_S, Binding, DraftSession, EarlyFeatures
from verifier_service.drafters.stream import Answered, Connected, Disconnected, Draining, LinkEvent, Loaded, Stream
from verifier_service.pacing import Message, Pace, Profile, StepCount

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
    slower than none, a drafter is sent nothing; see `pacing.policy`.

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
            deadline and acceptance is not synthetic: measurements need the number of drafts that was configured.
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
        self._unlearnt: list[tuple[DraftSession, Message, Answered]] = []
        is_synthetic = config.rejection_sample_method == cfg.SYNTHETIC
        self._is_adaptive = deadline_s is not None and not is_synthetic if adaptive_k is None else adaptive_k
        self._profile = profile or Profile()
        self.gate = DraftWaitPolicy(self._sessions, self._bindings)
        self._sender = StepSender(config, times, self.gate)
        self._num_decoding = 0  # requests, as of the last flush
        self._had_prompts = True  # whether the step that was counted last had any
        self._landed = 0.0  # when its tokens were there

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
        plan = None if session is None else session.pace.describe(self.gate.step_s)
        if plan is not None:
            status.plan.CopyFrom(plan)

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
                    self._profile,
                    is_adaptive=self._is_adaptive,
                    is_local=event.stream.sender.carrier != draft_pb2.CARRIER_BYTES,
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
                self._leave_behind(session)
                if session.closed_ids and session.has_room:
                    self._sender.send_closed(session, store)
            elif session.has_room:
                self._sender.send(session, store, now)
            elif not session.catches_up:  # else what is sent next asks for none
                self._hold(session, now)
            if session.unanswered_bytes > MAX_UNANSWERED_BYTES:
                self._give_up(session, f"more than {MAX_UNANSWERED_BYTES} bytes are unanswered")
        for session in self._sessions.values():
            session.give_up_early()
        self._sender.note_rows(requests)
        self._num_decoding = sum(request.is_decoding for request in requests)

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

    def count_step(
        self,
        *,
        has_prompts: bool,
        step_s: float,
        host_s: float,
        verified: Mapping[tuple[str, int], int],
        landed: float,
        is_beside: bool | None,
    ) -> None:
        """Learn from a step what drafts cost.

        Parameters
        ----------
        has_prompts
            Whether the step had rows of prompts, or the host launched a step with some before it took this one's
            tokens. Such a step, and the step behind it, say nothing about drafts.
        step_s, host_s
            Seconds of the step itself and of the host before it, waits left out; see `StepTimes`.
        verified
            How many decoding requests the step had, by the address of their drafter ("" for none) and their drafts.
        landed
            Monotonic time at which its tokens were there.
        is_beside
            Whether it was launched while another step ran; None where none ever is, so that the host's time counts.
        """
        seconds, self._landed = landed - self._landed, landed
        had_prompts, self._had_prompts = self._had_prompts, has_prompts
        if has_prompts or had_prompts:
            return
        pass_s = step_s + host_s if is_beside is None else step_s
        self.gate.count_step(pass_s)
        for session in self._sessions.values():
            session.pace.policy.count(self._step_count(session, seconds, pass_s, verified))

    def _step_count(
        self, session: DraftSession, seconds: float, pass_s: float, verified: Mapping[tuple[str, int], int]
    ) -> StepCount:
        """Return the step as the policy of one session's drafter counts it."""
        own = session.stream.address
        others = {one.stream.address: one for one in self._sessions.values() if one is not session}
        drafts = max((drafts for address, drafts in verified if address == own), default=0)
        drafted, other_tokens = 0, 0.0
        for (address, count), sequences in verified.items():
            if address == own and count == drafts > 0:
                drafted += sequences
            else:
                drafter = session if address == own else others.get(address)
                expected = [1.0] if drafter is None else drafter.pace.acceptance.expected_tokens()
                other_tokens += sequences * expected[min(count, len(expected) - 1)]
        return StepCount(
            now=self._landed,
            seconds=seconds,
            pass_s=pass_s,
            requests=max(self._num_decoding, sum(verified.values())),
            drafts=drafts,
            drafted=drafted,
            other_tokens=other_tokens,
            others_draft=any(one.is_counted_on and bool(one.bindings) for one in others.values()),
            catches_up=session.catches_up,
        )

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

    def may_follow(self, requests: Iterable[Request]) -> bool:
        """Return whether requests of a running step may go on before its tokens are known: none of them is to be sent
        to a drafter then. Either all may, or none, so that they stay together."""
        now = time.monotonic()
        for request in requests:
            binding = self._bindings.get(request)
            if binding is not None and binding.session.is_counted_on:
                return False
            if binding is None and request.num_speculative_tokens > 0 and self._takers(request, now):
                return False
        return True

    def may_go_on(self, request: Request) -> bool:
        """Whether a prompt may go on before its last rows have landed: it has its place at a drafter, if it gets one,
        and its features are sent whatever goes on."""
        if request.num_speculative_tokens == 0 or request in self._bindings:
            return True
        return not self._takers(request, time.monotonic())

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
        until = now + session.pace.patience_s(session.pace.num_drafts, self.gate.step_s)
        for binding in session.bindings:
            request = binding.request
            wants_drafts = request.is_decoding and request.num_drafts_wanted > 0
            if wants_drafts and binding.asked_length != len(request.tokens) and binding.wait_until is None:
                binding.wait_until = until

    def _leave_behind(self, session: DraftSession) -> None:
        """Give up the places of sequences that lack many rows at a drafter that is sent nothing."""
        session.catches_up = False
        for binding in [one for one in session.bindings if one.rows_behind > MAX_PAUSED_ROWS]:
            del self._bindings[binding.request]
            self._close(binding)

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
        self._unlearnt.append((session, message, answer))

    def _learn(self) -> None:
        """Counts the answers, and learns what they tell of their drafters. Not as they come: a step may begin with
        their drafts."""
        for session, message, answer in self._unlearnt:
            received, drafts = max(answer.received, message.sent), answer.drafts
            session.pace.take_answer(message, received, self.gate.step_s)
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
        self._drop(session)

    def _drop(self, session: DraftSession) -> None:
        self._sessions.pop(session.stream, None)
        session.stream.count_received()
        session.committed = None  # it keeps the session, as early features do, and with it memory that is shared
        session.give_up_early()
        for binding in session.bindings:
            del self._bindings[binding.request]
            if session.stream.is_expelled:
                self._expelled.add(binding.request)
        session.bindings.clear()
        session.sequences.clear()
