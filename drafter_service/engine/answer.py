"""The engine's answer to one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from draftwire.model.tensors import encode_floats, encode_ids
from draftwire.transport import Outgoing, TensorSender
from draftwire.transport.encoding import Encoded, encode, path_to
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb

_NO_TOKENS = np.empty(0, np.int32)
_LOGITS = path_to(pb.DraftResponse, "drafts", "logits", "data")
_LOGITS_TOKEN_IDS = path_to(pb.DraftResponse, "drafts", "logits_token_ids", "data")


class Load(NamedTuple):
    """Load of the engine."""

    sessions: int
    sequences: int
    kv_cache_usage: float  # [0, 1]

    def encode(self, message: pb.DrafterLoad) -> None:
        """Write the wire form."""
        message.sessions, message.sequences, message.kv_cache_usage = self


class Answer:
    """The contract's Drafts, one entry for each sequence that wanted drafts or failed, filled while the step runs.

    Attributes:
        drafts: The message so far; fields that do not depend on the drafts are filled first.
        tokens: Pieces of int32 [D], D = sum of num_drafts.
        confidences: Pieces of float32 [D]; none if they are not sent.
        logits, logits_token_ids: Pieces of float32 [D, n] and int32 [D, n], on any device.
        compute_time_s: Seconds in batches with rows of the step.
    """

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.tokens: list[np.ndarray] = []
        self.confidences: list[np.ndarray] = []
        self.logits: list[torch.Tensor] = []
        self.logits_token_ids: list[torch.Tensor] = []
        self.load: Load | None = None
        self.compute_time_s = 0.0
        self._outgoing: list[Outgoing | None] = [None, None]  # logits and their token ids
        self._response = pb.DraftResponse()
        self.drafts: pb.Drafts = self._response.drafts
        self.drafts.step_id = step_id

    def add_failure(self, sequence_id: int, status: pb.SequenceStatus) -> None:
        """Add a sequence whose rows were refused."""
        drafts = self.drafts
        drafts.sequence_ids.append(sequence_id)
        drafts.statuses.append(status)
        for column in (drafts.committed_lengths, drafts.last_tokens, drafts.num_drafts):
            column.append(0)

    def add_sequences(self, ids: list[int], committed_lengths: np.ndarray, last_tokens: np.ndarray) -> None:
        """Add sequences with drafts; call `add_drafts` before the next sequence is added."""
        drafts = self.drafts
        drafts.sequence_ids.extend(ids)
        drafts.statuses.extend([pb.SEQUENCE_STATUS_OK] * len(ids))
        drafts.committed_lengths.extend(committed_lengths.tolist())
        drafts.last_tokens.extend(last_tokens.tolist())

    def add_drafts(self, num_drafts: np.ndarray, tokens: np.ndarray) -> None:
        """Add the drafts int32 [D] of the sequences added last, in the order in which their logits are added."""
        self.drafts.num_drafts.extend(num_drafts.tolist())
        self.tokens.append(tokens)

    def begin_sending(self, sender: TensorSender, traffic: Traffic) -> None:
        """Copy the logits to memory for sending, on the engine's stream; does not wait for the copy."""
        self._outgoing = [_begin(self.logits, sender), _begin(self.logits_token_ids, sender)]
        for outgoing in self._outgoing:
            if outgoing is not None:
                traffic.count_tensor(outgoing.carrier, "sent", "logits", outgoing.tensor.nbytes)

    def encode(self, features_read: int) -> Encoded:
        """Return the message after `begin_sending`; waits for the logits.

        `features_read` is the generation up to which spans of features have been read.
        """
        drafts = self.drafts
        tokens = self.tokens[0] if len(self.tokens) == 1 else np.concatenate([_NO_TOKENS, *self.tokens])
        encode_ids(tokens, drafts.tokens)
        if self.confidences:
            encode_floats(np.concatenate(self.confidences), drafts.confidences)
        if self.load is not None:
            self.load.encode(drafts.load)
        drafts.compute_time_s = self.compute_time_s
        drafts.features_read = features_read
        logits, logits_token_ids = self._outgoing
        elements = None if logits is None else logits.finish(drafts.logits)
        ids = None if logits_token_ids is None else logits_token_ids.finish(drafts.logits_token_ids)
        return encode(self._response, (_LOGITS, elements), (_LOGITS_TOKEN_IDS, ids))


def _begin(pieces: list[torch.Tensor], sender: TensorSender) -> Outgoing | None:
    if not pieces:
        return None
    outgoing = sender.begin(pieces[0].dtype, (sum(len(piece) for piece in pieces), *pieces[0].shape[1:]))
    begin = 0
    for piece in pieces:
        outgoing.tensor[begin : begin + len(piece)].copy_(piece, non_blocking=True)
        begin += len(piece)
    outgoing.seal()
    return outgoing
