"""The interface between engine and heads: shapes, how rows enter a head's cache, how a head drafts.

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
    """Shapes of a head and of its target.

    Attributes:
        method: `eagle` is EAGLE-1 and EAGLE-2, which differ only in their draft trees.
        feature_layers: Target layers whose input states the head reads, ascending; target_num_layers means the state
            after the target's final norm.
        feature_width: Elements of one row of features of all feature layers.
        layer_shapes: (kv_heads, key head size, value head size) of each layer, for `draftwire.model.kv_cache.KVCache`.
        max_drafts: Maximum number of drafts of a step; None if the head has no limit.
        block_rows: Maximum number of rows of `DraftContext.block`. Every step reserves them after the accepted rows of
            each sequence that wants drafts. 0 for a head that writes one row for each draft but the last.
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
        """Return the number of rows after the accepted rows that a step with `num_drafts` >= 1 needs."""
        return self.block_rows or num_drafts - 1

    def rows_of_step(self, max_drafts: int) -> int:
        """Return the most rows of a sequence in a step with up to `max_drafts` drafts: accepted and later rows."""
        return max_drafts + 1 + self.rows_behind(max_drafts)


class Rows(NamedTuple):
    """Rows of several sequences in one pass."""

    tokens: torch.Tensor  # [T] int64, ids of the target's vocabulary
    positions: torch.Tensor  # [T] int64, rotary positions
    batch: RaggedBatch  # slots that the rows write and attend to


class DraftContext(ABC):
    """Inputs and operations of one draft step of N sequences.

    Attributes:
        cache: Keys and values of the sequences' rows.
        rows: The accepted rows of the step, at least one of each sequence; rows of padding have token and position 0.
        states: [T, hidden], `Head.fuse` of the features of the accepted rows.
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
        """Draw the drafts at offset `offset` of the step; call once for each offset, in order.

        Args:
            logits: [N, V_draft], q before the temperature.
            confidences: [N] float32, the probability that the target accepts the draft if it accepted all earlier ones,
                computed without the draft itself. None takes the largest probability of softmax(logits). Not read
                unless `wants_confidences`.

        Returns:
            [N] int64, target ids; 0 for invalid logits.
        """

    @abstractmethod
    def next_rows(self) -> Rows:
        """Return one row of each sequence, of the draft that was drawn last, after all earlier rows."""

    @abstractmethod
    def block(self, num_rows: int) -> Rows:
        """Return `num_rows` rows of each sequence after its accepted rows: row j of sequence b is b * num_rows + j.

        All tokens are 0. `num_rows` is at most `HeadSpec.block_rows`.
        """


class Head(ABC):
    """A draft head; one module per family.

    Attributes:
        spec: The head's shapes.
        draft_token_ids: [V_draft] int64, the target's id of each draft id; None if both vocabularies are the same.
        fingerprint: 16 hexadecimal digits, a hash of configuration and weights.
        fusion: The layer of `fuse`, if a verifier can run it; None for a head without fusion.
    """

    spec: HeadSpec
    draft_token_ids: torch.Tensor | None
    fingerprint: str
    fusion: FeatureFusion | None = None

    @abstractmethod
    def use_fp8(self) -> None:
        """Compute the products whose inputs are normed in 8 bits from now on.

        Raises:
            CheckpointError: If a size does not allow it.
        """

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states of rows of the target's features: [T, feature_width] -> [T, hidden]."""

    @abstractmethod
    def enter(self, rows: Rows, states: torch.Tensor, cache: KVCache) -> None:
        """Write accepted rows without drafts after them into the cache; `states` [T, hidden] as of `fuse`."""

    @abstractmethod
    def draft(self, context: DraftContext, num_drafts: int) -> None:
        """Write the step's accepted rows into the cache and draw `num_drafts` drafts for each sequence.

        The call must not wait for the device, so that a CUDA graph can capture it.
        """
