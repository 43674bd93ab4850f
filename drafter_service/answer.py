"""What the engine answers to one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from draftwire.carriers import Outgoing, TensorSender
from draftwire.tensors import encode_tensor
from draftwire.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb


@dataclass(frozen=True)
class Load:
    """How busy the engine is."""

    sessions: int
    sequences: int
    kv_cache_usage: float  # [0, 1]

    def encode(self) -> pb.DrafterLoad:
        """Wire form."""
        return pb.DrafterLoad(sessions=self.sessions, sequences=self.sequences, kv_cache_usage=self.kv_cache_usage)


@dataclass
class Answer:
    """The contract's Drafts, one entry for each sequence that wanted drafts or failed, filled while the step runs."""

    step_id: int
    sequence_ids: list[int] = field(default_factory=list)
    statuses: list[pb.SequenceStatus] = field(default_factory=list)
    committed_lengths: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)  # pieces of int32 [D], D = sum of num_drafts
    logits: list[torch.Tensor] = field(default_factory=list)  # pieces of float32 [D, n], on any device
    logits_token_ids: list[torch.Tensor] = field(default_factory=list)  # pieces of int32 [D, n], on any device
    load: Load | None = None
    compute_time_s: float = 0.0  # in batches that had rows of the step
    _outgoing: list[Outgoing | None] = field(default_factory=lambda: [None, None])  # logits and their token ids

    def add_failure(self, sequence_id: int, status: pb.SequenceStatus) -> None:
        """Adds a sequence whose rows were not taken."""
        self.sequence_ids.append(sequence_id)
        self.statuses.append(status)
        for column in (self.committed_lengths, self.last_tokens, self.num_drafts):
            column.append(0)

    def add_drafts(
        self,
        sequence_ids: list[int],
        committed_lengths: np.ndarray,
        last_tokens: np.ndarray,
        num_drafts: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """Adds sequences and the drafts int32 [D] of all of them, in the order in which their logits are added."""
        self.sequence_ids += sequence_ids
        self.statuses += [pb.SEQUENCE_STATUS_OK] * len(sequence_ids)
        self.committed_lengths += committed_lengths.tolist()
        self.last_tokens += last_tokens.tolist()
        self.num_drafts += num_drafts.tolist()
        self.tokens.append(tokens)

    def begin_sending(self, sender: TensorSender, traffic: Traffic) -> None:
        """Copies the logits to where they are sent from, in the order of the engine's stream; does not wait for it."""
        self._outgoing = [_begin(self.logits, sender), _begin(self.logits_token_ids, sender)]
        for outgoing in self._outgoing:
            if outgoing is not None:
                traffic.count_tensor(outgoing.carrier, "sent", "logits", outgoing.tensor.nbytes)

    def encode(self) -> pb.DraftResponse:
        """Wire form, once `begin_sending` was called; waits until the logits are there."""
        tokens = np.concatenate(self.tokens) if self.tokens else np.empty(0, np.int32)
        drafts = pb.Drafts(
            step_id=self.step_id,
            sequence_ids=self.sequence_ids,
            statuses=self.statuses,
            committed_lengths=self.committed_lengths,
            last_tokens=self.last_tokens,
            num_drafts=self.num_drafts,
            tokens=encode_tensor(torch.from_numpy(tokens)),
            load=self.load.encode() if self.load else None,
            compute_time_s=self.compute_time_s,
        )
        logits, logits_token_ids = self._outgoing
        if logits is not None:
            logits.finish(drafts.logits)
        if logits_token_ids is not None:
            logits_token_ids.finish(drafts.logits_token_ids)
        return pb.DraftResponse(drafts=drafts)


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
