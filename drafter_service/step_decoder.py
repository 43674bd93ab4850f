"""Reads a verifier's step messages; none that is malformed reaches the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence as List

import numpy as np
import torch

from drafter_service.step import OpenedSequence, Step, UpcomingStep
from draftwire.carriers import DrafterBoard, Incoming, TensorReceiver
from draftwire.errors import InvalidArgumentError
from draftwire.request_id import check_request_id
from draftwire.tensors import decode_id_array
from draftwire.tracing import check_traceparent
from draftwire.v1 import draft_pb2 as pb


class StepDecoder:
    """Checks the messages of one stream, in order."""

    def __init__(
        self,
        target_vocab_size: int,
        feature_width: int,
        dtype: torch.dtype,
        max_drafts: int,
        receiver: TensorReceiver,
        board: DrafterBoard | None = None,
        *,
        is_fused: bool = False,
    ) -> None:
        """`receiver` takes the features, which are of width `feature_width`, fused or not; `board` has what upcoming
        steps have drawn."""
        self._target_vocab_size = target_vocab_size
        self._feature_width = feature_width
        self._dtype = dtype
        self._max_drafts = max_drafts
        self._receiver = receiver
        self._board = board
        self._is_fused = is_fused
        self._last_step_id = 0
        # Ids rise within a stream, which is how "never reused" is enforced without remembering them all.
        self._last_opened_id = -1

    def decode(self, request: pb.DraftRequest) -> Step:
        """The step of a message; its tensors lie in the message's bytes or in shared memory.

        Raises
        ------
        InvalidArgumentError
            Names the field that is malformed.
        """
        if request.WhichOneof("message") != "step":
            raise InvalidArgumentError("message", request.WhichOneof("message"), "must be a step after the hello")
        step = request.step
        if step.step_id != self._last_step_id + 1:
            raise InvalidArgumentError("step_id", step.step_id, f"must be {self._last_step_id + 1}: it rises by 1")
        self._last_step_id = step.step_id
        opened = self._decode_opened(step.opened) if step.HasField("opened") else []
        # Lists, because each look at a repeated field costs as much as one of these conversions.
        sequence_ids, num_rows = step.sequence_ids[:], step.num_rows[:]
        columns = (step.first_rows[:], num_rows, step.num_drafts[:])
        self._check_sequences(sequence_ids, *columns)
        total = sum(num_rows)
        first_rows, counts, num_drafts = np.array(columns, np.int64)
        return Step(
            self._last_step_id,
            opened,
            step.closed_ids[:],
            sequence_ids,
            first_rows,
            counts,
            num_drafts,
            self._decode_tokens(step, total),
            self._claim_features(step, total),
            self._is_fused,
        )

    def decode_upcoming(self, upcoming: pb.UpcomingStep) -> UpcomingStep:
        """What a step will be; what is on the board then, and in the features' memory, is checked when it is there.

        Raises
        ------
        InvalidArgumentError
            Names the field that is malformed.
        """
        if self._board is None:
            raise InvalidArgumentError("upcoming", upcoming.drawn.offset, "no board was agreed on")
        sequence_ids, num_drafts = upcoming.sequence_ids[:], upcoming.num_drafts[:]
        columns = (upcoming.first_rows[:], [1] * len(sequence_ids), num_drafts)
        self._check_sequences(sequence_ids, *columns, message="upcoming.")
        if not sequence_ids:
            raise InvalidArgumentError("upcoming.sequence_ids", "none", "must be at least 1")
        if min(num_drafts) < 1:
            raise InvalidArgumentError("upcoming.num_drafts", min(num_drafts), f"allowed range [1, {self._max_drafts}]")
        if not 2 <= upcoming.columns <= self._max_drafts + 2:
            allowed = f"allowed range [2, num_speculative_tokens + 2 = {self._max_drafts + 2}]"
            raise InvalidArgumentError("upcoming.columns", upcoming.columns, allowed)
        self._board.check(upcoming.drawn, "upcoming.drawn", len(sequence_ids) * upcoming.columns)
        first_rows, _, wanted = np.array(columns, np.int64)
        return UpcomingStep(
            sequence_ids,
            first_rows,
            wanted,
            self._board,
            upcoming.drawn.generation,
            upcoming.drawn.offset,
            upcoming.columns,
            self._receiver,
            upcoming.features_offset,
            self._dtype,
            self._feature_width,
            self._is_fused,
        )

    def _decode_opened(self, opened: pb.OpenSequences) -> list[OpenedSequence]:
        count = len(opened.ids)
        _check_length("opened.temperatures", opened.temperatures, count, "opened.ids")
        _check_length("opened.proposal_keys", opened.proposal_keys, count, "opened.ids")
        _check_length("opened.first_rows", opened.first_rows, count, "opened.ids")
        if opened.request_ids:
            _check_length("opened.request_ids", opened.request_ids, count, "opened.ids")
        for request_id in opened.request_ids:
            check_request_id(request_id, "opened.request_ids")
        if opened.traceparents:
            _check_length("opened.traceparents", opened.traceparents, count, "opened.ids")
        for traceparent in opened.traceparents:
            check_traceparent(traceparent, "opened.traceparents")
        for sequence_id in opened.ids:
            if sequence_id <= self._last_opened_id:
                raise InvalidArgumentError(
                    "opened.ids", sequence_id, f"ids rise within a stream: must be above {self._last_opened_id}"
                )
            self._last_opened_id = sequence_id
        for temperature in opened.temperatures:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise InvalidArgumentError("opened.temperatures", temperature, "allowed range [0, inf)")
        columns = (opened.ids, opened.temperatures, opened.proposal_keys, opened.first_rows)
        return [OpenedSequence(*column) for column in zip(*columns, strict=True)]

    def _check_sequences(
        self,
        sequence_ids: list[int],
        first_rows: list[int],
        num_rows: list[int],
        num_drafts: list[int],
        message: str = "",
    ) -> None:
        """Checks the arrays of the sequences with rows; `message` goes before the names of the fields."""
        count = len(sequence_ids)
        ids = f"{message}sequence_ids"
        _check_length(f"{message}first_rows", first_rows, count, ids)
        _check_length(f"{message}num_rows", num_rows, count, ids)
        _check_length(f"{message}num_drafts", num_drafts, count, ids)
        if len(set(sequence_ids)) != count:
            raise InvalidArgumentError(ids, sequence_ids, "each id at most once")
        if count and min(num_rows) < 1:
            raise InvalidArgumentError("num_rows", min(num_rows), "must be at least 1")
        if count and max(num_drafts) > self._max_drafts:
            allowed = f"allowed range [0, num_speculative_tokens = {self._max_drafts}]"
            raise InvalidArgumentError(f"{message}num_drafts", max(num_drafts), allowed)

    def _decode_tokens(self, step: pb.DraftStep, num_rows: int) -> np.ndarray:
        if num_rows == 0 and not step.HasField("tokens"):
            return np.empty(0, np.int32)
        tokens = decode_id_array(step.tokens, "tokens", num_rows)
        # Read without its sign, a negative id is above all others: one look finds both kinds.
        if np.count_nonzero(tokens.view(np.uint32) >= self._target_vocab_size):
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise InvalidArgumentError("tokens", wrong, f"token ids must be in [0, {self._target_vocab_size})")
        return tokens

    def _claim_features(self, step: pb.DraftStep, num_rows: int) -> Incoming:
        if num_rows == 0 and not step.HasField("features"):
            return self._receiver.empty(self._dtype, (0, self._feature_width))
        return self._receiver.claim(step.features, "features", self._dtype, (num_rows, self._feature_width))


def _check_length(name: str, values: List[object], length: int, ids: str) -> None:
    if len(values) != length:
        raise InvalidArgumentError(name, f"{len(values)} entries", f"must be as many as {ids}, {length}")
