"""The engine's side of drafting: which sequences draft where, what each drafter has been sent, what it answered."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftwire import config as cfg
from draftwire.errors import InvalidArgumentError
from draftwire.tensors import encode_tensor
from draftwire.v1 import config_pb2, draft_pb2
from verifier_service.draft_answer import decode_answer, is_drawn_from_logits
from verifier_service.drafter_link import Answered, Connected, Disconnected, LinkEvent, Stream
from verifier_service.features import FeatureStore
from verifier_service.request import ReadyDrafts, Request

logger = logging.getLogger(__name__)

# A history that a drafter has not got is sent in pieces of this many rows, and all histories together take at most
# this many bytes of a message, so that they delay no other sequence.
MAX_HISTORY_ROWS = 512
MAX_HISTORY_BYTES = 16 * 1024 * 1024
# Steps and bytes that may be on their way unanswered; past the bytes the drafter counts as lost.
MAX_UNANSWERED_STEPS = 32
MAX_UNANSWERED_BYTES = 512 * 1024 * 1024
LOST_AFTER_S = 10.0
# A sequence that a drafter could not take is offered again after this long, twice as long each time.
REOPEN_DELAY_S = (0.5, 30.0)
# Share of answers with logits whose drafts are drawn again, and what expels a drafter: some mismatches that are a share
# of what was drawn. A single one can be two scores within rounding on different devices.
REDRAW_SHARE = 1 / 32
REDRAW_MISMATCHES = 3
REDRAW_MISMATCH_SHARE = 0.01


@dataclass(eq=False)
class _Session:
    """A stream and what is on its way over it."""

    stream: Stream
    draft_token_ids: torch.Tensor | None  # the head's, on the target's device
    step_id: int = 0
    last_sequence_id: int = 0
    bindings: list[_Binding] = field(default_factory=list)
    sequences: dict[int, _Binding] = field(default_factory=dict)  # those that are open, by id
    closed_ids: list[int] = field(default_factory=list)
    unanswered: dict[int, tuple[float, int]] = field(default_factory=dict)  # step: (sent at, bytes)
    is_late: bool = False
    redrawn: int = 0
    mismatches: int = 0

    @property
    def has_room(self) -> bool:
        return not self.is_late and len(self.unanswered) < MAX_UNANSWERED_STEPS


@dataclass(eq=False)
class _Binding:
    """A request's place at a drafter."""

    request: Request
    session: _Session
    next_row: int  # first row that has not been sent
    sequence_id: int = 0  # given when its first rows are sent, so that ids rise on the stream; 0 before
    asked_length: int = 0  # committed length for which drafts have been asked
    asked_drafts: int = 0
    asked_step: int = 0
    wait_until: float | None = None  # monotonic time until which the request waits for drafts


class Drafting:
    """Binds requests to drafters, feeds their heads and collects drafts. Used by the engine's thread alone.

    Sequences stick to a drafter; a new one goes to the drafter with the fewest. Nothing waits past the deadline: a
    drafter that misses it is late until it has answered everything, and in the meantime nobody waits for it.
    """

    def __init__(
        self, config: config_pb2.SpeculativeConfig, vocab_size: int, deadline_s: float | None, device: torch.device
    ) -> None:
        """`deadline_s` None waits until an answer comes or the drafter is lost."""
        self._config = config
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._device = device
        self._sessions: dict[Stream, _Session] = {}
        self._bindings: dict[Request, _Binding] = {}
        self._reopen: dict[Request, tuple[float, float]] = {}  # (not before, delay before that) s
        self._old_rows: dict[Request, int] = {}  # rows that were there at the last flush

    @property
    def feature_layers(self) -> set[tuple[int, ...]]:
        """Layers that the connected heads take features of."""
        return {stream.head.layers for stream in self._sessions}

    def sequences_at(self, address: str) -> int:
        """Sequences that draft at the drafter of that address."""
        return sum(len(s.bindings) for s in list(self._sessions.values()) if s.stream.address == address)

    def handle(self, event: LinkEvent) -> None:
        """Takes what happened on a stream."""
        if isinstance(event, Connected):
            ids = event.stream.head.draft_token_ids
            self._sessions[event.stream] = _Session(event.stream, None if ids is None else ids.to(self._device))
        elif event.stream in self._sessions:
            session = self._sessions[event.stream]
            if isinstance(event, Answered):
                self._take_answer(session, event.drafts)
            elif isinstance(event, Disconnected):
                self._drop(session)

    def is_ready(self, request: Request) -> bool:
        """Whether a decoding request goes into the next step: it has its drafts or does not wait for any."""
        binding = self._bindings.get(request)
        if binding is None or request.drafts is not None or binding.wait_until is None:
            return True
        if binding.session.is_late:
            return True
        if time.monotonic() < binding.wait_until:
            return False
        binding.session.is_late = True
        logger.warning("drafter %s: missed the draft deadline", binding.session.stream.address)
        return True

    def next_deadline(self) -> float | None:
        """The earliest time at which a waiting request stops to wait, or a drafter counts as lost."""
        waits = [b.wait_until for b in self._bindings.values() if b.wait_until is not None and not b.session.is_late]
        oldest = [min(s.unanswered.values())[0] + LOST_AFTER_S for s in self._sessions.values() if s.unanswered]
        finite = [time_ for time_ in (*waits, *oldest) if time_ != float("inf")]
        return min(finite, default=None)

    def release(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._reopen.pop(request, None)
        self._old_rows.pop(request, None)
        binding = self._bindings.pop(request, None)
        if binding is not None:
            self._unlink(binding)
            if binding.sequence_id:
                binding.session.closed_ids.append(binding.sequence_id)

    def drop_lost(self) -> None:
        """Gives up drafters that have not answered for long. To be called when all answers have been taken."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.unanswered and now > min(session.unanswered.values())[0] + LOST_AFTER_S:
                self._give_up(session, f"no answer in {LOST_AFTER_S:g} s")

    def flush(self, requests: Sequence[Request], stores: dict[tuple[int, ...], FeatureStore]) -> None:
        """Sends every drafter the rows that it has not got, and asks for drafts where all rows are there."""
        now = time.monotonic()
        for request in requests:
            if request not in self._bindings and request.num_speculative_tokens > 0:
                self._bind(request, stores, now)
        for session in list(self._sessions.values()):
            if session.has_room:
                self._send(session, stores[session.stream.head.layers], now)
            else:
                self._hold(session, now)
        for request in requests:
            self._old_rows[request] = request.num_feature_rows

    def _bind(self, request: Request, stores: dict[tuple[int, ...], FeatureStore], now: float) -> None:
        if request.num_feature_rows == 0 or now < self._reopen.get(request, (0.0, 0.0))[0]:
            return
        open_sessions = [
            session
            for session in self._sessions.values()
            if not session.is_late
            and len(session.bindings) < session.stream.head.max_sequences
            and request.num_feature_rows <= session.stream.head.max_model_len
        ]
        if not open_sessions:
            return
        session = min(open_sessions, key=lambda s: len(s.bindings))
        binding = _Binding(request, session, stores[session.stream.head.layers].first_row(request))
        session.bindings.append(binding)
        self._bindings[request] = binding

    def _wait(self, binding: _Binding, now: float) -> None:
        if binding.wait_until is None:
            binding.wait_until = float("inf") if self._deadline_s is None else now + self._deadline_s

    def _hold(self, session: _Session, now: float) -> None:
        """The drafter has enough to do: its requests wait, within the deadline, until they can be sent."""
        for binding in session.bindings:
            request = binding.request
            if request.is_decoding and request.num_drafts_wanted > 0 and binding.asked_length != len(request.tokens):
                self._wait(binding, now)

    def _send(self, session: _Session, store: FeatureStore, now: float) -> None:
        pieces = self._pieces(session)
        if not pieces and not session.closed_ids:
            return
        session.step_id += 1
        step = draft_pb2.DraftStep(step_id=session.step_id, closed_ids=session.closed_ids)
        session.closed_ids = []
        spans = []
        tokens: list[int] = []
        for binding, rows in pieces:
            request = binding.request
            if not binding.sequence_id:
                self._open(step, binding)
            first, last = binding.next_row, binding.next_row + rows
            binding.next_row = last
            spans.append((request.blocks, first, last))
            tokens += request.tokens[first + 1 : last + 1]
            step.sequence_ids.append(binding.sequence_id)
            step.first_rows.append(first)
            step.num_rows.append(rows)
            step.num_drafts.append(self._ask(binding, now))
        num_bytes = 0
        if pieces:
            features = store.read(spans, session.stream.head.dtype)
            num_bytes = features.numel() * features.itemsize
            encode_tensor(torch.tensor(tokens, dtype=torch.int32), step.tokens)
            encode_tensor(features, step.features)
        session.unanswered[step.step_id] = (now, num_bytes)
        session.stream.send(step)
        if sum(size for _, size in session.unanswered.values()) > MAX_UNANSWERED_BYTES:
            self._give_up(session, f"more than {MAX_UNANSWERED_BYTES} bytes are unanswered")

    def _pieces(self, session: _Session) -> list[tuple[_Binding, int]]:
        """(sequence, rows to send of it): all new rows, and some of the histories.

        A history are rows older than the last step, of a sequence that moves or whose drafter was held up.
        """
        room = max(MAX_HISTORY_BYTES // session.stream.head.row_bytes, 1)
        pieces = []
        for binding in session.bindings:
            request = binding.request
            rows = request.num_feature_rows - binding.next_row
            if binding.next_row < min(self._old_rows.get(request, 0), request.num_feature_rows):
                rows = min(rows, MAX_HISTORY_ROWS, room)
                room -= rows
            if rows > 0:
                pieces.append((binding, rows))
        return pieces

    def _open(self, step: draft_pb2.DraftStep, binding: _Binding) -> None:
        request = binding.request
        key = 0  # greedy drafters need none, and a key tells something of the seed
        if self._config.rejection_sample_method == cfg.COUPLED:
            key = request.keys.resample
        elif self._config.draft_sample_method == cfg.GUMBEL:
            key = request.keys.proposal
        session = binding.session
        session.last_sequence_id += 1
        binding.sequence_id = session.last_sequence_id
        session.sequences[binding.sequence_id] = binding
        step.opened.ids.append(binding.sequence_id)
        step.opened.temperatures.append(request.params.temperature)
        step.opened.proposal_keys.append(key)
        step.opened.first_rows.append(binding.next_row)

    def _ask(self, binding: _Binding, now: float) -> int:
        """Number of drafts to ask for with the rows just taken."""
        request = binding.request
        wanted = min(request.num_drafts_wanted, binding.session.stream.head.max_drafts)
        if not request.is_decoding or wanted == 0 or binding.next_row < len(request.tokens) - 1:
            return 0
        binding.asked_length, binding.asked_drafts = len(request.tokens), wanted
        binding.asked_step = binding.session.step_id
        binding.wait_until = None
        self._wait(binding, now)
        return wanted

    def _take_answer(self, session: _Session, drafts: draft_pb2.Drafts) -> None:
        if drafts.step_id not in session.unanswered:
            self._give_up(session, f"answered step {drafts.step_id}, which had no answer due", expel=True)
            return
        for step_id in [s for s in session.unanswered if s <= drafts.step_id]:
            del session.unanswered[step_id]
        session.is_late = session.is_late and bool(session.unanswered)
        try:
            self._store_drafts(session, drafts)
        except InvalidArgumentError as error:
            self._give_up(session, f"wrong answer: {error}", expel=True)
        for binding in session.bindings:
            if binding.asked_step <= drafts.step_id:
                binding.wait_until = None

    def _store_drafts(self, session: _Session, answer: draft_pb2.Drafts) -> None:
        head = session.stream.head
        for entry in decode_answer(
            answer, self._config, self._vocab_size, head.draft_vocab_size, session.draft_token_ids
        ):
            binding = session.sequences.get(entry.sequence_id)
            if binding is None:
                continue
            if entry.drafts is None:
                self._unbind(binding, time.monotonic())
            elif entry.drafts.committed_length == binding.asked_length:
                self._give(binding, entry.drafts)

    def _give(self, binding: _Binding, drafts: ReadyDrafts) -> None:
        request = binding.request
        if len(drafts.tokens) > binding.asked_drafts:
            raise InvalidArgumentError("drafts.num_drafts", len(drafts.tokens), f"{binding.asked_drafts} were asked")
        binding.wait_until = None
        if (drafts.committed_length, drafts.last_token) != (len(request.tokens), request.tokens[-1]):
            return
        is_sampled = drafts.logits is not None and request.params.temperature > 0
        if is_sampled and random.random() < REDRAW_SHARE:
            self._check_redraw(binding, drafts)
        request.drafts = drafts

    def _check_redraw(self, binding: _Binding, drafts: ReadyDrafts) -> None:
        session = binding.session
        session.redrawn += 1
        session.mismatches += not is_drawn_from_logits(
            drafts, binding.request, session.stream.head.draft_token_ids, self._config.use_fp64_gumbel
        )
        if session.mismatches >= max(REDRAW_MISMATCHES, REDRAW_MISMATCH_SHARE * session.redrawn):
            raise InvalidArgumentError("drafts.tokens", drafts.tokens.tolist(), "are not what its logits sample")

    def _unbind(self, binding: _Binding, now: float) -> None:
        """The drafter has no state of the sequence: it is opened anew after a while."""
        self._unlink(binding)
        del self._bindings[binding.request]
        _, delay = self._reopen.get(binding.request, (0.0, REOPEN_DELAY_S[0]))
        self._reopen[binding.request] = (now + delay, min(2 * delay, REOPEN_DELAY_S[1]))

    def _unlink(self, binding: _Binding) -> None:
        binding.session.bindings.remove(binding)
        binding.session.sequences.pop(binding.sequence_id, None)

    def _give_up(self, session: _Session, reason: str, *, expel: bool = False) -> None:
        session.stream.fail(reason, expel=expel)
        self._drop(session)

    def _drop(self, session: _Session) -> None:
        self._sessions.pop(session.stream, None)
        for binding in session.bindings:
            del self._bindings[binding.request]
        session.bindings.clear()
        session.sequences.clear()
