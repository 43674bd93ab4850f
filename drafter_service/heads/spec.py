"""What a head is to the engine: its shapes, how rows enter its cache and how it drafts. One file a family.

Notation as in proto/draftwire/v1/draft.proto: row i of a sequence has the token x_{i+1} and the features g_i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import KVCache, RaggedBatch

Method = Literal["eagle", "eagle3", "peagle", "dflash", "dspark"]


@dataclass(frozen=True)
class HeadSpec:
    """Shapes of a head and of the target that it was made for.

    Attributes:
        method: `eagle` stands for EAGLE-1 and EAGLE-2, which differ in their draft trees alone.
        feature_layers: Target layers whose input state the head reads, ascending; target_num_layers stands for the
            state after the target's final norm.
        feature_width: Elements of one row of features, all feature layers together.
        layer_shapes: (kv_heads, key head size, value head size) of each layer, for `draftwire.model.kv_cache.KVCache`.
        max_drafts: Most drafts of a step; None where the head has no bound.
        block_rows: Most rows of a block (`DraftContext.block`), for which every step with drafts has room behind the
            accepted rows of each sequence that wants drafts; 0 for a head that writes one row for each draft but the
            last.
    """

    method: Method
    hidden_size: int
    target_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    feature_layers: tuple[int, ...]
    feature_width: int
    draft_vocab_size: int
    layer_shapes: tuple[tuple[int, int, int], ...]
    max_position_embeddings: int
    max_drafts: int | None = None
    block_rows: int = 0

    def rows_behind(self, num_drafts: int) -> int:
        """Return how many rows behind the accepted ones a step of at least 1 draft needs room for."""
        return self.block_rows or num_drafts - 1

    def rows_of_step(self, max_drafts: int) -> int:
        """Return the most rows of a sequence in a step of up to so many drafts: accepted ones and those behind them."""
        return max_drafts + 1 + self.rows_behind(max_drafts)


class Rows(NamedTuple):
    """Rows of one pass, of several sequences."""

    tokens: torch.Tensor  # [T] int64, ids of the target's vocabulary
    positions: torch.Tensor  # [T] int64, rotary positions
    batch: RaggedBatch  # where they are written and what they attend to


class DraftContext(ABC):
    """What a head drafts from in one step of N sequences.

    Attributes:
        cache: Keys and values of the sequences' rows.
        rows: The accepted rows of the step, at least one of each sequence; rows of padding have token and position 0.
        states: [T, hidden], what `Head.fuse` made of the features of the accepted rows.
        last_rows: [N] int64, the last accepted row of each sequence. Its token is the last committed one, x_n.
        wants_confidences: Whether drafts are sent with confidences.
    """

    cache: KVCache
    rows: Rows
    states: torch.Tensor
    last_rows: torch.Tensor
    wants_confidences: bool

    @abstractmethod
    def draw(self, offset: int, logits: torch.Tensor, confidences: torch.Tensor | None = None) -> torch.Tensor:
        """Draw the drafts at place `offset` of the step; places are drawn in order, each once.

        Args:
            logits: [N, V_draft], q before the temperature.
            confidences: [N] float32, the probability that the target accepts the draft given that it accepted those
                before it, computed without the draft itself; None, of a head without an estimate of its own, takes the
                largest probability of softmax(logits). Not read where `wants_confidences` is false.

        Returns:
            [N] int64, target ids; 0 where the logits are no distribution.
        """

    @abstractmethod
    def next_rows(self) -> Rows:
        """Return one row of each sequence: that of the draft that was drawn last, behind all rows before it."""

    @abstractmethod
    def block(self, num_rows: int) -> Rows:
        """Return `num_rows` rows of each sequence behind its accepted rows: row j of sequence b is b * num_rows + j.

        All tokens are 0. There are at most `HeadSpec.block_rows`.
        """

class Head(ABC):
    """A draft head.

    Attributes:
        spec: The head's shapes.
        draft_token_ids: [V_draft] int64, the target's id of each draft id; None when both vocabularies are the same.
        fingerprint: 16 hexadecimal digits that change with the configuration or the weights.
        fusion: What `fuse` does, where it needs the features alone, so that a verifier can do it; else None.
    """

    spec: HeadSpec
    draft_token_ids: torch.Tensor | None
    fingerprint: str
    fusion: FeatureFusion | None = None

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states of rows that have features of the target: [T, feature_width] -> [T, hidden]."""

    @abstractmethod
    def enter(self, rows: Rows, states: torch.Tensor, cache: KVCache) -> None:
        """Write accepted rows, after which nothing is drafted, into the cache.

        Args:
            states: [T, hidden], of `fuse`.
        """

    @abstractmethod
    def draft(self, context: DraftContext, num_drafts: int) -> None:
        """Write the step's accepted rows into the cache and draw `num_drafts` drafts for each sequence.

        Launches alone: nothing waits for the device, so that a CUDA graph can capture the call.
        """
