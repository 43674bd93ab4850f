"""The rows of a step: the scheduled rows of each request, and the tensors of the target's forward pass."""

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

# Placeholder of a token that only the device knows.
UNKNOWN_TOKEN = 0


class SampledLogprobs(NamedTuple):
    """Log probabilities under the target. Messages are built at delivery, because that takes longer than sampling."""

    num_top: int  # most likely tokens to report beside the emitted token
    ranks: Tensor  # [R] int64, of the sampled token of each row
    top_ids: Tensor  # [R, >= num_top] int64
    values: Tensor  # [R, >= 1 + num_top] float32, the sampled token's first

    def messages(self, count: int) -> list[generate_pb2.TokenLogprobs]:
        """Return the log probabilities of the first `count` tokens."""
        ids, values = self.top_ids[:count, : self.num_top], self.values[:count, : 1 + self.num_top]
        return [
            generate_pb2.TokenLogprobs(logprob=own, rank=rank, top_ids=top_ids, top_logprobs=top)
            for rank, top_ids, (own, *top) in zip(
                self.ranks[:count].tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]


class SampledTokens(NamedTuple):
    """Tokens that a step sampled for one request; none if the logits were no distribution."""

    tokens: list[int]
    logprobs: SampledLogprobs | None = None  # if the request asks for log probabilities


@dataclass(slots=True, eq=False)
class ScheduledRows:
    """The rows of one request in a step, and the step's result for the request."""

    request: Request
    start: int  # position of the first row
    tokens: list[int]  # tokens of the rows: committed tokens, then drafts
    drafts: ReadyDrafts | None
    samples: bool  # whether its last row, or each row of a decoding request, samples a token
    follows: int | None = None  # index of its only token in the previous step's sample
    cause: generate_pb2.FallbackCause | None = None  # why the request has no drafts, if known
    offered: ReadyDrafts | None = None  # the drafts that arrived, of which the first ones are verified
    is_decoding: bool = field(init=False)  # whether the request decodes before the step
    num_drafts: int = field(init=False)  # draft rows
    num_logit_rows: int = field(init=False)  # rows that tokens are drawn from, the last ones
    num_prompt_logit_rows: int = field(init=False)  # rows before them that give log probabilities of the prompt
    admission: int = field(init=False)  # preemptions of the request so far
    sampled: SampledTokens | None = field(init=False, default=None)
    sampled_at: float = field(init=False, default=0.0)  # monotonic time at which the host had the sample
    prompt_logprobs: SampledLogprobs | None = field(init=False, default=None)  # of `prompt_logprob_tokens`
    piece: Piece | None = field(init=False, default=None)  # the emitted part of the sample
    # Taken at the end of a request; at every step if a stop text may end the output.
    statistics: generate_pb2.RequestStatistics | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.is_decoding = self.request.is_decoding or self.follows is not None
        self.num_drafts = 0 if self.drafts is None else len(self.drafts.tokens)
        self.num_logit_rows = 1 + self.num_drafts if self.samples else 0
        self.num_prompt_logit_rows = 0 if self.request.prompt_logprobs is None else self._count_prompt_rows()
        self.admission = self.request.num_preemptions

    def _count_prompt_rows(self) -> int:
        if self.request.num_prompt_logprobs_left == 0:
            return 0
        # After a preemption, rows run again whose log probabilities are committed.
        end = self.start + len(self.tokens) - self.num_logit_rows
        return max(0, end - max(self.start, self.request.num_prompt_logprobs))

    @property
    def prompt_logprob_tokens(self) -> list[int]:
        """Return the tokens of the prompt that this step's prompt rows with logits predict."""
        end = self.start + len(self.tokens) - self.num_logit_rows + 1
        return self.request.prompt[end - self.num_prompt_logit_rows : end]

    @property
    def is_current(self) -> bool:
        """Return whether the request has neither ended nor been preempted since this step was planned."""
        return bool(self.request.blocks) and self.request.num_preemptions == self.admission


@dataclass(frozen=True)
class FutureTokens:
    """Token ids that the previous step samples, known only to the device."""

    rows: np.ndarray
    """[F] int64: the step's rows with such a token."""
    places: np.ndarray
    """[F] int64: index of the token in `tokens`."""
    tokens: Tensor
    """[B] int64 on the device, -1 where nothing was sampled."""

    def write(self, token_ids: Tensor) -> None:
        """Write the tokens into the step's token ids. A request without a token gets any id; its end follows."""
        rows, places = upload([self.rows, self.places], token_ids.device)
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, places).clamp_(min=0))


@dataclass(frozen=True)
class ForwardInput:
    """Input of the target's forward pass, on the host."""

    token_ids: np.ndarray
    """[T] int64, grouped by sequence."""
    positions: np.ndarray
    """[T] int64."""
    sequences: Sequence[SequenceRows]
    """Cache slots that the rows write and attend to."""
    logit_rows: np.ndarray
    """[R] int64, ascending: the rows with logits."""
    future: FutureTokens | None = None
    """Token ids that are missing in `token_ids`."""


@dataclass(frozen=True)
class ForwardOutput:
    """Output of a forward pass of T rows, on the device; valid until the next forward pass."""

    logits: Tensor
    """[R, vocab_size] of the logit rows, in the target's dtype."""
    states: Sequence[Tensor]
    """num_layers + 1 tensors [>= T, hidden_size]: each layer's input states, and the states after the final norm."""
    slots: Tensor
    """[T] int64, slots of the rows in the cache."""
    slots_on_host: np.ndarray
    """The same on the host."""
    began: torch.cuda.Event | None = None
    """On a GPU: recorded after the inputs were copied."""

    def features(self, layers: Sequence[int]) -> Tensor:
        """Return the input states of `layers`, concatenated: [T, len(layers) * hidden_size]; num_layers is the last."""
        return torch.cat([self.states[layer][: len(self.slots_on_host)] for layer in layers], dim=-1)

    def with_logits_of(self, rows: np.ndarray) -> ForwardOutput:
        """Return the output with the logits of `rows`, int64 [R]."""
        if np.array_equal(rows, np.arange(len(self.logits))):
            return self
        (index,) = upload([rows], self.logits.device)
        return replace(self, logits=self.logits.index_select(0, index))
