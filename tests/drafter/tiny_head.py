"""A head with a few thousand random weights that depends on the same inputs as a real head."""

from __future__ import annotations

from typing import Any

import torch

from drafter_service.heads.chain import ChainHead
from drafter_service.heads.spec import HeadSpec
from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import KVCache, RaggedBatch
from draftwire_kernels import paged_attention

HIDDEN = 16
WIDTH = 24
TARGET_VOCAB = 40
DRAFT_VOCAB = 24
MAX_POSITIONS = 96


class TinyHead(ChainHead):
    """Two attention layers: a state depends on the token, the feature, the position and every earlier row, and so do
    the second layer's keys and values."""

    def __init__(self, reduced_vocabulary: bool = True, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(3)
        draft_vocab = DRAFT_VOCAB if reduced_vocabulary else TARGET_VOCAB
        self.spec = HeadSpec(
            method="eagle3",
            hidden_size=HIDDEN,
            target_vocab_size=TARGET_VOCAB,
            target_hidden_size=8,
            target_num_layers=9,
            feature_layers=(2, 4, 6),
            feature_width=WIDTH,
            draft_vocab_size=draft_vocab,
            layer_shapes=((1, 8, 8), (1, 8, 8)),
            max_position_embeddings=MAX_POSITIONS,
        )
        self.fingerprint = "0123456789abcdef"
        self.draft_token_ids: Any = (
            torch.randperm(TARGET_VOCAB, generator=draw)[:DRAFT_VOCAB].sort().values if reduced_vocabulary else None
        )
        self.embedding = torch.randn(TARGET_VOCAB, HIDDEN, generator=draw)
        self.fc = torch.randn(WIDTH, HIDDEN, generator=draw) * 0.2
        # Small, so that rounding errors grow tenfold over four drafts, not ten thousandfold.
        self.qkv = torch.randn(2 * HIDDEN, 32, generator=draw) * 0.15
        self.out = torch.randn(16, HIDDEN, generator=draw)
        self.lm_head = torch.randn(HIDDEN, draft_vocab, generator=draw)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        self.fusion: FeatureFusion = FeatureFusion(self.fc.T.contiguous())
        self.rows_of_forwards: list[int] = []

    def use_fp8(self) -> None:
        """Change nothing: no product of this head has a normed input."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.fusion(features)

    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        self.rows_of_forwards.append(len(tokens))
        phase = torch.sin(positions[:, None] * torch.arange(1, HIDDEN + 1, device=positions.device) * 0.37)
        embedded = self.embedding[tokens] + phase
        for keys, values in zip(cache.keys, cache.values, strict=True):
            query, key, value = (torch.cat([embedded, g], -1) @ self.qkv).split([16, 8, 8], -1)
            attended = paged_attention(
                query.unflatten(-1, (2, 8)), key[:, None], value[:, None], keys, values, batch, scale=0.5
            )
            g = torch.tanh(g + attended.flatten(1) @ self.out)
        return g

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return g @ self.lm_head
