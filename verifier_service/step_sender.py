"""What a drafter is sent: rows of features with their tokens, and how many drafts are wanted of each sequence."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from draftwire import config as cfg
from draftwire.carriers import Outgoing
from draftwire.logs import fields
from draftwire.tensors import encode_ids
from draftwire.tracing import is_exporting
from draftwire.v1 import config_pb2, draft_pb2
from verifier_service.draft_session import Binding, CommittedStep, DraftSession, EarlyFeatures
from verifier_service.features import FeatureStore
from verifier_service.pacing import MOST_ROWS
from verifier_service.request import Request
from verifier_service.step_gate import StepGate
from verifier_service.step_times import StepTimes

logger = logging.getLogger(__name__)

# A history that a drafter has not got is sent in pieces of this many rows, and all histories together take at most
# this many bytes of a message, so that they delay no other sequence.
MAX_HISTORY_ROWS = 512
MAX_HISTORY_BYTES = 16 * 1024 * 1024
# Where the host copies them, which is limited, a message has so many of each sequence at least, on average: steps bring
# more meanwhile.
LEAST_ROWS_COPIED = 6
# While sequences catch up there is a message no more often than this: on a GPU's host one takes the engine's thread
# some 2 ms, whatever it has (docs/decisions/018-message-cost.md), and nobody waits for it.
CATCH_UP_EVERY_S = 8e-3

# For so long sequences may wait for the fewer ones that lack rows, where nothing is asked for until they have them: by
# what that is thought to take, and at most.
LONGEST_CATCH_UP_S, LATEST_CATCH_UP_S = 1.0, 2.0

# Rows to send of a sequence.
_Piece = tuple[Binding, int]


class _Rows(NamedTuple):
    """Rows of a message, sequence after sequence."""

    bindings: list[Binding]
    first_rows: list[int]
    num_rows: list[int]
    num_drafts: list[int]  # wanted after them
    tokens: list[int]  # of all rows


class StepSender:
    """Sends drafters the rows that they have not got. Used by the engine's thread alone."""

    def __init__(self, config: config_pb2.SpeculativeConfig, times: StepTimes, gate: StepGate) -> None:
        """Bytes and rows are counted in `times`; `gate` is told of rows, which take some of the engine's time."""
        self._config = config
        self._times = times
        self._gate = gate
        self._most_verified = config.num_speculative_tokens + 1  # rows of a verify step
        self._old_rows: dict[Request, int] = {}  # rows that were there when all had been sent last

    def send(self, session: DraftSession, store: FeatureStore, now: float) -> None:
        """Sends new rows of all sequences, and asks for drafts of those whose rows are all there then.

        Rows of prompts and histories go in a message of their own, after the one for which drafts are waited. Where the
        number of drafts adapts it asks for none: those behind the next step's rows are hardly later, and nobody waits
        for a drafter that reads a long prompt. Neither is anything sent behind such rows that take longer than a step,
        nor asked for while many sequences lack some; but where most lack no more than goes within a step, that goes
        with what they are asked for.
        """
        is_adaptive = session.pace.governor.is_adaptive
        session.has_caught_up = False  # the scouts, should they be few again
        session.asks_nothing = is_adaptive and session.pace.is_busy(now)
        if session.asks_nothing:
            return
        pieces, lacking = self._pieces(session, session.bindings, now)
        lack_most = is_adaptive and 2 * len(lacking) > sum(one.request.is_decoding for one in session.bindings)
        session.catches_up = session.asks_nothing = is_adaptive and self._lack_much(session, lacking, lack_most, now)
        if session.catches_up:
            if now >= session.pace.histories_sent + CATCH_UP_EVERY_S:
                pieces, _ = self._pieces(session, session.bindings, now, is_idle=True)
                if pieces or session.closed_ids:
                    self._send_step(session, store, pieces, 0, has_histories=True)
            return
        if lack_most and all(_in_flight(session)):  # they will be asked for with rows that it adds
            return
        num_drafts = session.pace.take_num_drafts(bool(pieces))
        if lack_most:  # a little each
            self._send_step(session, store, pieces, num_drafts, has_histories=True)
            return
        others = [piece for piece in pieces if piece[1] > self._most_verified]
        verified = [piece for piece in pieces if piece[1] <= self._most_verified] if others else pieces
        has_asked = False
        if verified or session.closed_ids:
            has_asked = self._send_step(session, store, verified, num_drafts)
        if others and (has_asked or not (is_adaptive and any(_in_flight(session)))):  # else those come behind
            self._send_step(session, store, others, 0 if is_adaptive else num_drafts, has_histories=True)

    def _lack_much(self, session: DraftSession, lacking: list[Binding], lack_most: bool, now: float) -> bool:
        """Whether sequences are to catch up, of which those `lacking` lack more than the rows of a step: if most do,
        and more than is sent within a step, or prompts; and until it is no more than that, unless the fewer ones that
        lack some then would keep the others for long, or have."""
        pace, row_bytes = session.pace, session.stream.head.row_bytes
        rows = sum(binding.rows_behind for binding in lacking)
        is_of_few = session.catches_up and not lack_most
        session.few_since = min(session.few_since, now) if is_of_few else math.inf
        if rows <= self._backlog(session, now) and all(binding.sequence_id for binding in lacking):
            return False
        if not is_of_few:
            return lack_most
        num_messages = min(pace.steps_within(LONGEST_CATCH_UP_S), LONGEST_CATCH_UP_S / CATCH_UP_EVERY_S)
        most_rows = min(pace.rows_within(LONGEST_CATCH_UP_S, row_bytes), self._most_copied(session) * num_messages)
        return rows <= most_rows and now < session.few_since + LATEST_CATCH_UP_S

    def _backlog(self, session: DraftSession, now: float, *, is_idle: bool = False) -> int:
        """How many rows of prompts and histories may be sent in one message."""
        rows = session.pace.backlog_rows(now, session.stream.head.row_bytes, is_idle=is_idle)
        return min(rows, self._most_copied(session, is_idle=is_idle))

    def _most_copied(self, session: DraftSession, *, is_idle: bool = False) -> int:
        """The most of them that the host may copy into it. Where the session `is_idle` it has the new rows of sequences
        that are close too, which count; but as many as a few of each one go at least. Where every step is to have its
        drafts, none of them waits."""
        if not session.pace.governor.is_adaptive or session.stream.sender.carrier != draft_pb2.CARRIER_BYTES:
            return MOST_ROWS
        hidden = int(self._gate.copy_limit.num_bytes) // session.stream.head.row_bytes
        close = sum(binding.rows_behind for binding in session.bindings if is_idle and self.is_close(binding))
        return max(hidden, LEAST_ROWS_COPIED * len(session.bindings)) - close

    def send_scouts(
        self,
        session: DraftSession,
        store: FeatureStore,
        scouts: Sequence[Binding],
        num_drafts: int,
        now: float,
        *,
        waits: bool,
    ) -> bool:
        """Sends new rows of a few sequences of a drafter that is asked for nothing, and waits for its answer or not;
        whether it was asked for drafts, `num_drafts` of each."""
        pieces, _ = self._pieces(session, scouts, now)
        if not pieces and not session.closed_ids:
            return False
        has_histories = any(rows > self._most_verified for _, rows in pieces)
        return self._send_step(session, store, pieces, num_drafts, has_histories=has_histories, waits=waits)

    def is_close(self, binding: Binding) -> bool:
        """Whether a sequence lacks no more rows than a verify step brings."""
        return binding.rows_behind <= self._most_verified

    def note_rows(self, requests: Sequence[Request]) -> None:
        """All drafters have been sent what they are to be sent: rows that are there now are history from here on."""
        self._old_rows = {request: request.num_feature_rows for request in requests}

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._old_rows.pop(request, None)

    def _send_step(
        self,
        session: DraftSession,
        store: FeatureStore,
        pieces: list[_Piece],
        num_drafts: int,
        *,
        has_histories: bool = False,
        waits: bool = True,
    ) -> bool:
        """Sends rows and asks for so many drafts of each sequence that is complete, which it `waits` for or not;
        whether any is. Drafts of a sequence that goes on meanwhile are of no use but for the time that they take."""
        session.step_id += 1
        step = draft_pb2.DraftStep(step_id=session.step_id, closed_ids=session.closed_ids)
        session.closed_ids = []
        for binding, _ in pieces:
            if not binding.sequence_id:
                self._open(step, binding)
        rows = _take_rows(pieces, num_drafts, waits=waits)
        early, num_rows = session.early, len(rows.tokens)
        if early is not None and not early.is_unchanged(rows.bindings, rows.first_rows, rows.num_drafts):
            session.give_up_early()
            early = None
        if early is not None and early.announced is not None:
            sent, features = time.monotonic(), early.features
            self._commit(session, early, rows, list(step.closed_ids))
        else:
            features = self._fill(step, session, store, rows, early)
            sent = time.monotonic()
            session.stream.send(step, features)
        session.early = None
        # The rest is done while the drafter computes.
        num_bytes = num_rows * session.stream.head.row_bytes
        carrier = draft_pb2.CARRIER_BYTES if features is None else features.carrier
        num_asked = sum(drafts > 0 for drafts in rows.num_drafts)
        most = max(rows.num_drafts, default=0)
        message = session.pace.send(
            sent, num_bytes, num_rows, most, num_asked, has_histories=has_histories, waits=waits
        )
        if session.has_replaced:  # the drafter may be busy with early drafts that it has to drop
            message = replace(message, is_behind=True)
            session.has_replaced = False
        session.unanswered[session.step_id] = message
        for binding, drafts in zip(rows.bindings, rows.num_drafts, strict=True):
            if drafts > 0:
                binding.asked_step, binding.asked_length = session.step_id, len(binding.request.tokens)
                binding.asked_drafts = drafts
                binding.wait_until = message.wait_until if waits else None
        self._times.count_sent(carrier, num_rows, num_bytes)
        copied_bytes = num_bytes if carrier == draft_pb2.CARRIER_BYTES else 0
        self._gate.count_sent(num_rows, has_histories=has_histories, copied_bytes=copied_bytes)
        return num_asked > 0

    def _commit(self, session: DraftSession, early: EarlyFeatures, rows: _Rows, closed_ids: list[int]) -> None:
        """Commit the step that was announced: the drafter has its tokens and features."""
        assert early.announced is not None
        session.last_resolved = early.announced.announced_id
        asked = [binding for binding, drafts in zip(rows.bindings, rows.num_drafts, strict=True) if drafts > 0]
        places = {binding: place for place, binding in enumerate(early.bindings)}
        # A sequence that the drafter has lost is not among those to be closed, but has no rows in the step either.
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

    def _fill(
        self,
        step: draft_pb2.DraftStep,
        session: DraftSession,
        store: FeatureStore,
        rows: _Rows,
        early: EarlyFeatures | None,
    ) -> Outgoing | None:
        """Write rows into a step's message, and return their features: the `early` ones, if there are."""
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

    def _pieces(
        self, session: DraftSession, bindings: Sequence[Binding], now: float, *, is_idle: bool = False
    ) -> tuple[list[_Piece], list[Binding]]:
        """(sequence, rows to send of it): all new rows of verify steps, and some of prompts and histories; and the
        sequences that decode and lack more than a verify step brings.

        A history are rows older than the last step: those of a sequence that moves or whose drafter was held up, and a
        prefix that was found in the cache. Where it `is_idle`, no drafts are waited for.
        """
        row_bytes = session.stream.head.row_bytes
        room = max(MAX_HISTORY_BYTES // row_bytes, 1)
        backlog = None
        pieces = []
        lacking = []
        for binding in bindings:
            request, first = binding.request, binding.next_row
            rows = request.num_feature_rows - first
            if rows <= 0:
                continue
            if rows > self._most_verified and request.is_decoding:
                lacking.append(binding)
            if first < self._old_rows.get(request, request.num_reused):
                rows = min(rows, MAX_HISTORY_ROWS, room)
                room -= rows
            if rows > self._most_verified:
                if backlog is None:
                    backlog = self._backlog(session, now, is_idle=is_idle)
                rows = min(rows, backlog)
                backlog -= rows
            if rows > 0:
                pieces.append((binding, rows))
        return pieces, lacking

    def _open(self, step: draft_pb2.DraftStep, binding: Binding) -> None:
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
        step.opened.request_ids.append(request.request_id)
        if is_exporting():
            step.opened.traceparents.append(request.traceparent)
        told = fields(
            request_id=request.request_id, drafter=session.stream.address, sequence_id=binding.sequence_id
        )
        logger.debug("sequence opened", extra=told)


def _in_flight(session: DraftSession) -> list[bool]:
    """Of each sequence that decodes, whether a step has it that has not landed."""
    return [binding.request.is_in_flight for binding in session.bindings if binding.request.is_decoding]


def _take_rows(pieces: Sequence[_Piece], num_drafts: int, *, waits: bool) -> _Rows:
    """Count rows as sent, and say how many drafts are wanted after them, at most `num_drafts` of each sequence."""
    taken = _Rows([], [], [], [], [])
    for binding, rows in pieces:
        request = binding.request
        first, known = binding.next_row, request.tokens
        binding.next_row = last = first + rows
        drafts = 0
        # All rows are there, and the request decodes.
        if len(request.prompt) <= last == len(known) - 1 and not (waits and request.is_in_flight):
            drafts = min(request.num_drafts_wanted, num_drafts)
            binding.wait_until = None
        taken.bindings.append(binding)
        taken.first_rows.append(first)
        taken.num_rows.append(rows)
        taken.num_drafts.append(drafts)
        taken.tokens.extend(known[first + 1 : last + 1])
    return taken
