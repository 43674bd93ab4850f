"""The messages to a drafter: rows of features with their tokens, and the requested drafts of each sequence."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from draftwire.contract import validation as cfg
from draftwire.model.tensors import encode_ids
from draftwire.server.logs import fields
from draftwire.server.tracing import is_exporting
from draftwire.transport import Outgoing
from draftwire.v1 import config_pb2, draft_pb2
from verifier_service.core.request import Request
from verifier_service.core.step_times import StepTimes
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.drafters.features import FeatureStore
from verifier_service.drafters.session import Binding, CommittedStep, DraftSession, EarlyFeatures

logger = logging.getLogger(__name__)

# The backlog of a sequence is sent in pieces of at most this many rows, and all backlogs in a message take at most this
# many bytes, so that they delay no other sequence.
MAX_BACKLOG_ROWS = 512
MAX_BACKLOG_BYTES = 16 * 1024 * 1024
# When more than half of the sequences have a backlog, no drafts are requested until at most FEW_SHARE have one, or at
# most half had one for LONGEST_FEW_S seconds.
FEW_SHARE, LONGEST_FEW_S = 0.125, 1.0

# A sequence and its number of rows to send.
_Piece = tuple[Binding, int]


class _Rows(NamedTuple):
    """Rows of a message, sequence after sequence."""

    bindings: list[Binding]
    first_rows: list[int]
    num_rows: list[int]
    num_drafts: list[int]  # requested drafts after the rows
    tokens: list[int]  # tokens of all rows


class StepSender:
    """Sends drafters their missing rows. Only the engine's thread uses it."""

    def __init__(self, config: config_pb2.SpeculativeConfig, times: StepTimes, waits: DraftWaitPolicy) -> None:
        """`times` counts bytes and rows; `waits` knows the seconds of a step."""
        self._config = config
        self._times = times
        self._waits = waits
        self._most_verified = config.num_speculative_tokens + 1  # rows of a verify step
        self._old_rows: dict[Request, int] = {}  # number of rows at the last flush

    def send(self, session: DraftSession, store: FeatureStore, now: float) -> None:
        """Send new rows of all sequences, and request drafts for sequences without a backlog.

        With adaptive k, rows of prompts and backlogs go in a separate message without drafts, after the message whose
        drafts are awaited. While most sequences have a backlog, only backlogs are sent, and all sequences decode
        without drafts: drafts for a few would delay the steps of all.
        """
        backlog, is_adaptive = session.pace.backlog, session.pace.is_adaptive
        most_rows = backlog.rows(session.stream.head.row_bytes) if is_adaptive else math.inf
        pieces = self._pieces(session, most_rows)
        session.catches_up = is_adaptive and self._must_catch_up(session, now)
        if session.catches_up:
            if backlog.may_send(now) and any(rows > self._most_verified for _, rows in pieces):
                self._send_step(session, store, pieces, 0, has_backlog=True)
                session.catches_up = self._must_catch_up(session, now)
            return
        num_drafts = session.pace.num_drafts
        verified = [piece for piece in pieces if self._is_close(piece[0])]
        others = [piece for piece in pieces if not self._is_close(piece[0])]
        has_asked = False
        if verified or session.closed_ids:
            has_asked = self._send_step(session, store, verified, num_drafts)
        # Otherwise the next drafts would wait behind these rows.
        if others and (has_asked or not (is_adaptive and any(_in_flight(session)))):
            self._send_step(session, store, others, 0 if is_adaptive else num_drafts, has_backlog=True)

    def send_closed(self, session: DraftSession, store: FeatureStore) -> None:
        """Send the ids of closed sequences, without rows."""
        self._send_step(session, store, [], 0)

    def _must_catch_up(self, session: DraftSession, now: float) -> bool:
        """Return whether only backlogs are sent, because too many sequences have one."""
        decoding = [binding for binding in session.bindings if binding.request.is_decoding]
        num_lacking = sum(not self._is_close(binding) for binding in decoding)
        lack_most = 2 * num_lacking > len(decoding)
        if lack_most or not session.catches_up:
            session.few_since = now
            return lack_most
        return num_lacking > FEW_SHARE * len(decoding) and now < session.few_since + LONGEST_FEW_S

    def _is_close(self, binding: Binding) -> bool:
        """Return whether a sequence lacks at most the rows of one verify step."""
        return binding.rows_behind <= self._most_verified

    def note_rows(self, requests: Sequence[Request]) -> None:
        """End a flush: rows that exist now and were not sent are a backlog from now on."""
        self._old_rows = {request: request.num_feature_rows for request in requests}

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._old_rows.pop(request, None)

    def _send_step(
        self,
        session: DraftSession,
        store: FeatureStore,
        pieces: list[_Piece],
        num_drafts: int,
        *,
        has_backlog: bool = False,
    ) -> bool:
        """Send rows, and request `num_drafts` drafts for each complete sequence. Return whether any is complete."""
        session.step_id += 1
        step = draft_pb2.DraftStep(step_id=session.step_id, closed_ids=session.closed_ids)
        session.closed_ids = []
        for binding, _ in pieces:
            if not binding.sequence_id:
                self._open(step, binding)
        rows = _take_rows(pieces, num_drafts)
        early, num_rows = session.early, len(rows.tokens)
        if early is not None and not early.is_unchanged(rows.bindings, rows.first_rows, rows.num_drafts):
            session.give_up_early()
            early = None
        features: Outgoing | None
        if early is not None and early.announced is not None:
            sent, features = time.monotonic(), early.features
            self._commit(session, early, rows, list(step.closed_ids))
        else:
            features = self.fill(step, session, store, rows, early)
            sent = time.monotonic()
            session.stream.send(step, features)
        session.early = None
        # The drafter computes meanwhile.
        num_bytes = num_rows * session.stream.head.row_bytes
        carrier = draft_pb2.CARRIER_BYTES if features is None else features.carrier
        num_asked = sum(drafts > 0 for drafts in rows.num_drafts)
        most = max(rows.num_drafts, default=0)
        step_s = self._waits.step_s
        message = session.pace.send(sent, num_bytes, num_rows, most, num_asked, step_s=step_s, has_backlog=has_backlog)
        session.unanswered[session.step_id] = message
        for binding, drafts in zip(rows.bindings, rows.num_drafts, strict=True):
            if drafts > 0:
                binding.asked_step, binding.asked_length = session.step_id, len(binding.request.tokens)
                binding.asked_drafts = drafts
                binding.wait_until = message.wait_until
        self._times.count_sent(carrier, num_rows, num_bytes)
        return num_asked > 0

    def _commit(self, session: DraftSession, early: EarlyFeatures, rows: _Rows, closed_ids: list[int]) -> None:
        """Commit the announced step, whose tokens and features the drafter has."""
        assert early.announced is not None
        session.last_resolved = early.announced.announced_id
        asked = [binding for binding, drafts in zip(rows.bindings, rows.num_drafts, strict=True) if drafts > 0]
        places = {binding: place for place, binding in enumerate(early.bindings)}
        # A sequence that the drafter has lost is not among closed_ids, and has no rows in the step.
        lost = [one.sequence_id for one in early.bindings if not one.is_open and one.sequence_id not in closed_ids]
        session.committed = CommittedStep(
            session.step_id, asked, [places[binding] for binding in asked], early.announced
        )
        commit = draft_pb2.Commit(
            step_id=session.step_id,
            announced_id=early.announced.announced_id,
            closed_ids=closed_ids + lost,
            num_drafts=rows.num_drafts,
        )
        session.stream.send(commit, early.features)

    def fill(
        self,
        step: draft_pb2.DraftStep,
        session: DraftSession,
        store: FeatureStore,
        rows: _Rows,
        early: EarlyFeatures | None,
    ) -> Outgoing | None:
        """Write rows into a step's message, and return their features: the `early` features, if given."""
        step.replaces = session.last_resolved
        if not rows.bindings:
            return None
        step.sequence_ids.extend([binding.sequence_id for binding in rows.bindings])
        step.first_rows.extend(rows.first_rows)
        step.num_rows.extend(rows.num_rows)
        step.num_drafts.extend(rows.num_drafts)
        encode_ids(rows.tokens, step.tokens)
        if early is not None:
            early.features.keep(len(rows.tokens))
            return early.features
        head = session.stream.head
        features = session.stream.sender.begin(head.dtype, (len(rows.tokens), head.width))
        columns = zip(rows.bindings, rows.first_rows, rows.num_rows, strict=True)
        store.read([(one.request.blocks, first, first + count) for one, first, count in columns], features.tensor)
        features.seal()
        return features

    def _pieces(self, session: DraftSession, most_rows: float) -> list[_Piece]:
        """Return (sequence, rows to send): all rows of verify steps, and up to `most_rows` of backlogs.

        Rows older than the last step are a backlog: of a moved sequence, a slow drafter, or a cached prefix. A message
        has at most MAX_BACKLOG_ROWS of a sequence's backlog, and MAX_BACKLOG_BYTES of all backlogs.
        """
        room = max(MAX_BACKLOG_BYTES // session.stream.head.row_bytes, 1)
        pieces = []
        for binding in session.bindings:
            request, first = binding.request, binding.next_row
            rows = request.num_feature_rows - first
            if rows > self._most_verified:
                rows = int(min(rows, most_rows))
                most_rows -= rows
            if first < self._old_rows.get(request, request.num_reused):
                rows = min(rows, MAX_BACKLOG_ROWS, room)
                room -= rows
            if rows > 0:
                pieces.append((binding, rows))
        return pieces

    def _open(self, step: draft_pb2.DraftStep, binding: Binding) -> None:
        request = binding.request
        key = 0  # greedy drafters need no key, and a key reveals information about the seed
        if self._config.draft_sample_method == cfg.GUMBEL:
            is_coupled = self._config.rejection_sample_method == cfg.COUPLED
            key = request.keys.resample if is_coupled else request.keys.proposal
        session = binding.session
        session.last_sequence_id += 1
        binding.sequence_id = session.last_sequence_id
        session.sequences[binding.sequence_id] = binding
        step.opened.ids.append(binding.sequence_id)
        step.opened.temperatures.append(request.params.temperature)
        step.opened.proposal_keys.append(key)
        step.opened.first_rows.append(binding.next_row)
        step.opened.request_ids.append(request.request_id)
        if is_exporting():
            step.opened.traceparents.append(request.traceparent)
        logged = fields(request_id=request.request_id, drafter=session.stream.address, sequence_id=binding.sequence_id)
        logger.debug("sequence opened", extra=logged)


def _in_flight(session: DraftSession) -> list[bool]:
    """Return, for each decoding sequence, whether it is in a running step."""
    return [binding.request.is_in_flight for binding in session.bindings if binding.request.is_decoding]


def _take_rows(pieces: Sequence[_Piece], num_drafts: int) -> _Rows:
    """Mark rows as sent, and return them with the drafts to request, at most `num_drafts` for each sequence."""
    taken = _Rows([], [], [], [], [])
    for binding, rows in pieces:
        request = binding.request
        first, known = binding.next_row, request.tokens
        binding.next_row = last = first + rows
        drafts = 0
        # No rows are missing, and the request decodes.
        if len(request.prompt) <= last == len(known) - 1 and not request.is_in_flight:
            drafts = min(request.num_drafts_wanted, num_drafts)
            binding.wait_until = None
        taken.bindings.append(binding)
        taken.first_rows.append(first)
        taken.num_rows.append(rows)
        taken.num_drafts.append(drafts)
        taken.tokens.extend(known[first + 1 : last + 1])
    return taken
