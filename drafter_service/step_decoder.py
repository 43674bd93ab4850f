"""Reads a verifier's step messages; none that is malformed reaches the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence as List

import torch

from drafter_service.step import OpenedSequence, Step
from draftwire.errors import InvalidArgumentError
from draftwire.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb


class StepDecoder:
    """Checks the messages of one stream, in order."""

    def __init__(self, target_vocab_size: int, feature_width: int, dtype: torch.dtype, max_drafts: int) -> None:
        self._target_vocab_size = target_vocab_size
        self._feature_width = feature_width
        self._dtype = dtype
        self._max_drafts = max_drafts
        self._last_step_id = 0
        # Ids rise within a stream, which is how "never reused" is enforced without remembering them all.
        self._last_opened_id = -1

    def decode(self, request: pb.DraftRequest) -> Step:
        """The step of a message; its tensors lie in the message's bytes.

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
        opened = self._decode_opened(step.opened)
        num_rows = self._check_sequences(step)
        return Step(
            step_id=step.step_id,
            opened=opened,
            closed_ids=list(step.closed_ids),
            sequence_ids=list(step.sequence_ids),
            first_rows=list(step.first_rows),
            num_rows=list(step.num_rows),
            num_drafts=list(step.num_drafts),
            tokens=self._decode_tokens(step, num_rows),
            features=self._decode_features(step, num_rows),
        )

    def _decode_opened(self, opened: pb.OpenSequences) -> list[OpenedSequence]:
        count = len(opened.ids)
        _check_length("opened.temperatures", opened.temperatures, count, "opened.ids")
        _check_length("opened.proposal_keys", opened.proposal_keys, count, "opened.ids")
        _check_length("opened.first_rows", opened.first_rows, count, "opened.ids")
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

    def _check_sequences(self, step: pb.DraftStep) -> int:
        """Checks the arrays of the sequences with rows; the number of rows."""
        count = len(step.sequence_ids)
        _check_length("first_rows", step.first_rows, count, "sequence_ids")
        _check_length("num_rows", step.num_rows, count, "sequence_ids")
        _check_length("num_drafts", step.num_drafts, count, "sequence_ids")
        if len(set(step.sequence_ids)) != count:
            raise InvalidArgumentError("sequence_ids", list(step.sequence_ids), "each id at most once")
        if count and min(step.num_rows) < 1:
            raise InvalidArgumentError("num_rows", min(step.num_rows), "must be at least 1")
        if count and max(step.num_drafts) > self._max_drafts:
            raise InvalidArgumentError(
                "num_drafts",
                max(step.num_drafts),
                f"allowed range [0, num_speculative_tokens = {self._max_drafts}]",
            )
        return sum(step.num_rows)

    def _decode_tokens(self, step: pb.DraftStep, num_rows: int) -> torch.Tensor:
        if num_rows == 0 and not step.HasField("tokens"):
            return torch.empty(0, dtype=torch.int32)
        tokens = decode_tensor(step.tokens, "tokens", torch.int32, (num_rows,))
        if num_rows:
            smallest, largest = (int(end) for end in tokens.aminmax())
            if smallest < 0 or largest >= self._target_vocab_size:
                wrong = smallest if smallest < 0 else largest
                raise InvalidArgumentError("tokens", wrong, f"token ids must be in [0, {self._target_vocab_size})")
        return tokens

    def _decode_features(self, step: pb.DraftStep, num_rows: int) -> torch.Tensor:
        if num_rows == 0 and not step.HasField("features"):
            return torch.empty(0, self._feature_width, dtype=self._dtype)
        return decode_tensor(step.features, "features", self._dtype, (num_rows, self._feature_width))


def _check_length(name: str, values: List[object], length: int, ids: str) -> None:
    if len(values) != length:
        raise InvalidArgumentError(name, f"{len(values)} entries", f"must be as many as {ids}, {length}")
