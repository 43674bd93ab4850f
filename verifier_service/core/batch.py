"""The rows of a step: what is scheduled of each request, and the tensors of the target's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwire.model.devices import upload
from draftwire.model.kv_cache import SequenceRows
from draftwire.v1 import generate_pb2
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.core.stop_conditions import Piece

# Stands for a token that only the device knows.
UNKNOWN_TOKEN = 0


class SampledLogprobs(NamedTuple):
    """Log probabilities under the target. To make messages of them takes longer than to sample, and is left until they
    are delivered."""

    num_top: int  # likeliest tokens that are reported beside the emitted one
    ranks: Tensor  # [R] int64, of the sampled token of each row
    top_ids: Tensor  # [R, >= num_top] int64
    values: Tensor  # [R, >= 1 + num_top] float32, the sampled token's first

    def messages(self, count: int) -> list[generate_pb2.TokenLogprobs]:
        """Return those of the first `count` tokens."""
        ids, values = self.top_ids[:count, : self.num_top], self.values[:count, : 1 + self.num_top]
        return [
            generate_pb2.TokenLogprobs(logprob=own, rank=rank, top_ids=top_ids, top_logprobs=top)
            for rank, top_ids, (own, *top) in zip(
                self.ranks[:count].tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]


class SampledTokens(NamedTuple):
    """What a step sampled for one request: no tokens when its logits were not a distribution."""

    tokens: list[int]
    logprobs: SampledLogprobs | None = None  # where they are asked for


@dataclass
class ScheduledRows:
    """The rows of one request in a step, and what the step brings the request."""

    request: Request
    start: int  # position of the first row
    tokens: list[int]  # of the rows: committed tokens, then drafts
    drafts: ReadyDrafts | None
    samples: bool  # whether its last row, or each row of a decoding request, samples a token
    follows: int | None = None  # place of its only token among those that the previous step samples
    cause: generate_pb2.FallbackCause | None = None  # why it has no drafts, where that is known
    is_decoding: bool = field(init=False)  # whether it verifies, as the request is before the step
    num_drafts: int = field(init=False)  # draft rows
    num_logit_rows: int = field(init=False)  # rows whose logits are wanted
    admission: int = field(init=False)  # preemptions of the request so far
    sampled: SampledTokens | None = field(init=False, default=None)
    sampled_at: float = field(init=False, default=0.0)  # monotonic time at which the host had it
    piece: Piece | None = field(init=False, default=None)  # what of it is emitted
    # At the request's end; where a stop text may end the output, at every step.
    statistics: generate_pb2.RequestStatistics | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.is_decoding = self.request.is_decoding or self.follows is not None
        self.num_drafts = 0 if self.drafts is None else len(self.drafts.tokens)
        self.num_logit_rows = 1 + self.num_drafts if self.samples else 0
        self.admission = self.request.num_preemptions

    @property
    def is_current(self) -> bool:
        """Whether the request still has the blocks that it had: it has neither ended nor been preempted since."""
        return bool(self.request.blocks) and self.request.num_preemptions == self.admission


@dataclass(frozen=True)
class FutureTokens:
    """Token ids that the previous step samples: the device alone has them."""

    rows: np.ndarray
    """[F] int64: rows of the step that have such a token."""
    places: np.ndarray
    """[F] int64: where it is in `tokens`."""
    tokens: Tensor
    """[B] int64 on the device, -1 where nothing was sampled."""

    def write(self, token_ids: Tensor) -> None:
        """Write them into the step's token ids; a request without one continues with any token until it is ended."""
        rows, places = upload([self.rows, self.places], token_ids.device)
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, places).clamp_(min=0))


@dataclass(frozen=True)
class ForwardInput:
    """What a forward pass of the target computes, on the host."""

    token_ids: np.ndarray
    """[T] int64, sequence after sequence."""
    positions: np.ndarray
    """[T] int64."""
    sequences: Sequence[SequenceRows]
    """Where the rows are written and what they attend to."""
    logit_rows: np.ndarray
    """[R] int64, ascending: the rows whose logits are wanted."""
    future: FutureTokens | None = None
    """Token ids that `token_ids` lacks."""


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward pass of T rows computes, on the device; valid until the next one."""

    logits: Tensor
    """[R, vocab_size] of the logit rows, in the target's dtype."""
    states: Sequence[Tensor]
    """num_layers + 1 of at least T rows of [hidden_size]: those entering each layer, and the last after the norm."""
    slots: Tensor
    """[T] int64, where the rows are in the cache."""
    slots_on_host: np.ndarray
    """The same on the host."""
    began: torch.cuda.Event | None = None
    """On a GPU: when it had the inputs."""

    def features(self, layers: Sequence[int]) -> Tensor:
        """[T, len(layers) * hidden_size]: the states entering `layers` side by side; num_layers is the last state."""
        return torch.cat([self.states[layer][: len(self.slots_on_host)] for layer in layers], dim=-1)

    def with_logits_of(self, rows: np.ndarray) -> ForwardOutput:
        """The same with the logits of some of the rows that it has them of, int64 [R]."""
        if np.array_equal(rows, np.arange(len(self.logits))):
            return self
        (index,) = upload([rows], self.logits.device)
        return replace(self, logits=self.logits.index_select(0, index))
