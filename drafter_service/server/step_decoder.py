"""Decode and check a verifier's step messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as List

import numpy as np
import torch

from drafter_service.engine.step import AnnouncedStep, OpenedSequence, Step
from draftwire.contract.errors import InvalidArgumentError, QueueFullError
from draftwire.contract.request_id import check_request_id
from draftwire.contract.spans import check_traceparent
from draftwire.model.tensors import decode_id_array
from draftwire.transport import Body, Incoming, TensorReceiver
from draftwire.v1 import draft_pb2 as pb

# Maximum number of announced steps that are neither committed nor dropped.
MAX_ANNOUNCED = 4


class StepDecoder:
    """Checks the messages of one stream, in order, and keeps announced steps until they are committed or dropped."""

    def __init__(
        self,
        target_vocab_size: int,
        feature_width: int,
        dtype: torch.dtype,
        max_drafts: int,
        receiver: TensorReceiver,
        *,
        is_fused: bool = False,
    ) -> None:
        """`receiver` takes the features, which are of width `feature_width`, fused or not."""
        self._target_vocab_size = target_vocab_size
        self._feature_width = feature_width
        self._dtype = dtype
        self._max_drafts = max_drafts
        self._receiver = receiver
        self._is_fused = is_fused
        self.row_bytes = feature_width * dtype.itemsize  # of the features
        self._last_step_id = 0
        self._announced: deque[AnnouncedStep] = deque()
        self._last_announced_id = 0
        # Ids must rise within a stream, so that reuse is refused without a list of all ids.
        self._last_opened_id = -1

    def decode(self, request: pb.DraftRequest) -> Step:
        """Return the step of a DraftStep or of a Commit; its tensors are in the message's bytes or in shared memory.

        Raises:
            InvalidArgumentError: If a field is malformed.
        """
        kind = request.WhichOneof("message")
        if kind == "commit":
            return self._decode_commit(request.commit)
        if kind != "step":
            raise InvalidArgumentError("message", kind, "must be a step after the hello")
        step = request.step
        self._count_step(step.step_id)
        if step.replaces:
            self._drop_announced(step.replaces, "replaces")
        opened = self._decode_opened(step.opened) if step.HasField("opened") else []
        # Lists: each access to a repeated field costs as much as one of these conversions.
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

    def decode_announce(self, announce: pb.Announce, body: Body | None) -> AnnouncedStep:
        """Return an announced step with the `body` of its record; numbers written there later are not checked yet.

        Raises:
            InvalidArgumentError: If a field is malformed.
            QueueFullError: If MAX_ANNOUNCED steps are neither committed nor dropped.
        """
        if len(self._announced) == MAX_ANNOUNCED:
            raise QueueFullError(f"{MAX_ANNOUNCED} announced steps are neither committed nor replaced")
        if announce.announced_id != self._last_announced_id + 1:
            allowed = f"must be {self._last_announced_id + 1}: it rises by 1"
            raise InvalidArgumentError("announce.announced_id", announce.announced_id, allowed)
        sequence_ids, first_rows = announce.sequence_ids[:], announce.first_rows[:]
        num_rows, num_drafts = announce.num_rows, announce.num_drafts
        count = len(sequence_ids)
        self._check_sequences(sequence_ids, first_rows, [1] * count, [num_drafts] * count, "announce.")
        _check_range("announce.num_drafts", num_drafts, 1, self._max_drafts, "num_speculative_tokens")
        _check_range("announce.columns", announce.columns, 2, self._max_drafts + 2, "num_speculative_tokens + 2")
        if not sequence_ids:
            raise InvalidArgumentError("announce.sequence_ids", "none", "must be at least 1")
        most = count * (announce.columns - 1)
        _check_range("announce.num_rows", num_rows, count, most, "sequences * (columns - 1)")
        num_numbers = count * announce.columns
        if body is None or body.num_numbers != num_numbers:
            given = "no body" if body is None else f"{body.num_numbers} numbers"
            raise InvalidArgumentError("announce", given, f"must have {num_numbers}, sequences * columns")
        features = self._receiver.claim_span(
            announce.features, "announce.features", self._dtype, (num_rows, self._feature_width)
        )
        self._last_announced_id = announce.announced_id
        announced = AnnouncedStep(
            announced_id=announce.announced_id,
            sequence_ids=sequence_ids,
            first_rows=np.array(first_rows, np.int64),
            num_drafts=num_drafts,
            columns=announce.columns,
            body=body,
            features=features,
            vocab_size=self._target_vocab_size,
            is_fused=self._is_fused,
        )
        self._announced.append(announced)
        return announced

    def _decode_commit(self, commit: pb.Commit) -> Step:
        """Return the step of the announced sequences that are not closed."""
        self._count_step(commit.step_id)
        self._drop_announced(min(commit.announced_id - 1, self._last_announced_id), "commit.announced_id")
        if not self._announced or self._announced[0].announced_id != commit.announced_id:
            known = [one.announced_id for one in self._announced]
            allowed = f"must be announced, and neither committed nor replaced: {known or 'none is'}"
            raise InvalidArgumentError("commit.announced_id", commit.announced_id, allowed)
        announced = self._announced.popleft()
        announced.is_resolved = True
        drawn = announced.read() if announced.is_written else None
        if drawn is None:
            raise InvalidArgumentError(
                "commit.announced_id", commit.announced_id, "must have rows and tokens, written before the commit"
            )
        closed = set(commit.closed_ids)
        is_open = [one not in closed for one in announced.sequence_ids]
        places, (counts, tokens), rows = np.flatnonzero(is_open), drawn, None
        if len(places) < len(is_open):
            rows = np.flatnonzero(np.repeat(is_open, counts))
            tokens = tokens[rows]
        num_drafts = commit.num_drafts[:]
        _check_length("commit.num_drafts", num_drafts, len(places), "the announced sequences that are not closed")
        if num_drafts:
            _check_range("commit.num_drafts", max(num_drafts), 0, announced.num_drafts, "num_drafts as announced")
        return Step(
            step_id=self._last_step_id,
            opened=[],
            closed_ids=commit.closed_ids[:],
            sequence_ids=[announced.sequence_ids[place] for place in places.tolist()],
            first_rows=announced.first_rows[places],
            num_rows=counts[places],
            num_drafts=np.array(num_drafts, np.int64),
            tokens=tokens,
            features=announced.features,
            is_fused=self._is_fused,
            announced=announced,
            places=places,
            rows=rows,
        )

    def _count_step(self, step_id: int) -> None:
        if step_id != self._last_step_id + 1:
            raise InvalidArgumentError("step_id", step_id, f"must be {self._last_step_id + 1}: it rises by 1")
        self._last_step_id = step_id

    def _drop_announced(self, announced_id: int, name: str) -> None:
        """Drop the announced steps up to an id."""
        if announced_id > self._last_announced_id:
            allowed = f"must be at most {self._last_announced_id}, announced so far"
            raise InvalidArgumentError(name, announced_id, allowed)
        while self._announced and self._announced[0].announced_id <= announced_id:
            self._announced.popleft().drop()

    def close(self) -> None:
        """Drop all announced steps."""
        self._drop_announced(self._last_announced_id, "")

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
        """Check the arrays of the sequences with rows; `message` is the prefix of field names in errors."""
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
        # Read as unsigned, a negative id exceeds every valid id, so one comparison finds both errors.
        if np.count_nonzero(tokens.view(np.uint32) >= self._target_vocab_size):
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise InvalidArgumentError("tokens", wrong, f"token ids must be in [0, {self._target_vocab_size})")
        return tokens

    def _claim_features(self, step: pb.DraftStep, num_rows: int) -> Incoming:
        if num_rows == 0 and not step.HasField("features"):
            return self._receiver.empty(self._dtype, (0, self._feature_width))
        return self._receiver.claim(step.features, "features", self._dtype, (num_rows, self._feature_width))


def _check_range(name: str, value: int, low: int, high: int, what: str) -> None:
    if not low <= value <= high:
        raise InvalidArgumentError(name, value, f"allowed range [{low}, {what} = {high}]")


def _check_length(name: str, values: List[object], length: int, ids: str) -> None:
    if len(values) != length:
        raise InvalidArgumentError(name, f"{len(values)} entries", f"must be as many as {ids}, {length}")
