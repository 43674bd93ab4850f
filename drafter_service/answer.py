"""What the engine answers to one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from draftwire.tensors import encode_tensor
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
    tokens: list[np.ndarray] = field(default_factory=list)  # int32 [num_drafts] of each entry with drafts
    logits: list[torch.Tensor] = field(default_factory=list)  # pieces of float32 [D, n], CPU
    logits_token_ids: list[torch.Tensor] = field(default_factory=list)  # pieces of int32 [D, n], CPU
    load: Load | None = None

    def add_failure(self, sequence_id: int, status: pb.SequenceStatus) -> None:
        """Adds a sequence whose rows were not taken."""
        self._add(sequence_id, status, 0, 0, 0)

    def add_drafts(self, sequence_id: int, committed_length: int, last_token: int, tokens: np.ndarray) -> None:
        """Adds the drafts int32 [n] of a sequence, in the order in which their logits are added."""
        self._add(sequence_id, pb.SEQUENCE_STATUS_OK, committed_length, last_token, len(tokens))
        self.tokens.append(tokens)

    def _add(self, sequence_id: int, status: pb.SequenceStatus, length: int, token: int, drafts: int) -> None:
        self.sequence_ids.append(sequence_id)
        self.statuses.append(status)
        self.committed_lengths.append(length)
        self.last_tokens.append(token)
        self.num_drafts.append(drafts)

    def encode(self) -> pb.DraftResponse:
        """Wire form."""
        tokens = np.concatenate(self.tokens) if self.tokens else np.empty(0, np.int32)
        drafts = pb.Drafts(
            step_id=self.step_id,
            sequence_ids=self.sequence_ids,
            statuses=self.statuses,
            committed_lengths=self.committed_lengths,
            last_tokens=self.last_tokens,
            num_drafts=self.num_drafts,
            tokens=encode_tensor(torch.from_numpy(tokens)),
            logits=_encode_pieces(self.logits),
            logits_token_ids=_encode_pieces(self.logits_token_ids),
            load=self.load.encode() if self.load else None,
        )
        return pb.DraftResponse(drafts=drafts)


def _encode_pieces(pieces: list[torch.Tensor]) -> pb.Tensor | None:
    if not pieces:
        return None
    return encode_tensor(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
