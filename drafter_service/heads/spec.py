"""What a head is to the engine: its shapes and three functions over ragged batches of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import KVCache, RaggedBatch

Method = Literal["eagle", "eagle3"]


@dataclass(frozen=True)
class HeadSpec:
    """Shapes of a head and of the target that it was made for.

    Attributes
    ----------
    method
        `eagle` stands for EAGLE-1 and EAGLE-2, which differ in their draft trees alone.
    feature_layers
        Target layers whose input state the head reads, ascending; target_num_layers stands for the state after the
        target's final norm.
    feature_width
        Elements of one row of features, all feature layers together.
    layer_shapes
        (kv_heads, key head size, value head size) of each layer, for `draftwire.model.kv_cache.KVCache`.
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


class Head(ABC):
    """A draft head.

    Row i of a sequence takes the token at position i + 1 and the state g at position i, at rotary position i; its
    logits predict the token at position i + 2.

    Attributes
    ----------
    spec
        The head's shapes.
    draft_token_ids
        [V_draft] int64, the target's id of each draft id; None when both vocabularies are the same.
    fingerprint
        16 hexadecimal digits that change with the configuration or the weights.
    fusion
        What `fuse` does, where it needs the features alone, so that a verifier can do it; else None.
    """

    spec: HeadSpec
    draft_token_ids: torch.Tensor | None
    fingerprint: str
    fusion: FeatureFusion | None = None

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The states g of rows that have features of the target: [T, feature_width] -> [T, hidden]."""

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """One pass over the rows of `batch`, which writes their keys and values into `cache`.

        Parameters
        ----------
        tokens
            [T] int64, ids of the target's vocabulary.
        g
            [T, hidden], of `fuse` or of an earlier pass.
        positions
            [T] int64, rotary positions.

        Returns
        -------
        torch.Tensor
            [T, hidden], the state that `logits` takes and that the next draft row takes as its g.
        """

    @abstractmethod
    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """Scores of the next token over the draft vocabulary: [N, hidden] of `forward` -> [N, V_draft]."""
