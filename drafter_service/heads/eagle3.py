"""EAGLE-3: one state fused from several layers of the target, a first layer that reads [embedding, state]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drafter_service.heads.config import HeadConfig
from drafter_service.heads.layers import DecoderLayer, Linear, RMSNorm
from drafter_service.heads.rope import RotaryEmbedding
from drafter_service.heads.spec import Head
from drafter_service.heads.tensors import TensorSource
from draftwire.kv_cache import KVCache, RaggedBatch


class Eagle3Head(Head):
    """An EAGLE-3 head (arXiv 2503.01840), with the options of `HeadConfig`.

    The state that a pass returns has not gone through the final norm, and skips `fuse` in the next pass.
    """

    def __init__(
        self, config: HeadConfig, source: TensorSource, fingerprint: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.fingerprint = config.spec, fingerprint
        spec, hidden, eps = config.spec, config.spec.hidden_size, config.layer.norm_eps
        self._norm_before_residual, self._norm_output = config.norm_before_residual, config.norm_output
        self._embedding = source.embedding(spec.target_vocab_size, hidden)
        self._rotary = RotaryEmbedding(config.rope, dtype, device)
        self._feature_norm: RMSNorm | None = None
        if config.norm_before_fc:
            self._feature_norm = RMSNorm(source.take("input_norm.weight", spec.feature_width), eps)
        self._feature_norms: list[RMSNorm] = []
        if config.fc_norm:
            names = [f"fc_norm.{i}.weight" for i in range(len(spec.feature_layers))]
            self._feature_norms = [RMSNorm(source.take(name, spec.target_hidden_size), eps) for name in names]
        self._fc = Linear(source, ["fc"], [hidden], spec.feature_width, bias=False)
        self._embedding_norm = RMSNorm(source.take("layers.0.input_layernorm.weight", hidden), eps)
        self._state_norm = RMSNorm(source.take("layers.0.hidden_norm.weight", hidden), eps)
        self._layers = [
            DecoderLayer(source, config.layer, hidden if index else 2 * hidden, index, window)
            for index, window in enumerate(config.windows)
        ]
        later = [f"layers.{index}.input_layernorm.weight" for index in range(1, len(self._layers))]
        self._later_norms = [RMSNorm(source.take(name, hidden), eps) for name in later]
        self._norm = RMSNorm(source.take("norm.weight", hidden), eps)
        same_vocabulary = spec.draft_vocab_size == spec.target_vocab_size
        self._output = source.output(spec.draft_vocab_size, hidden, shared=same_vocabulary)
        self.draft_token_ids = source.draft_vocabulary(spec.draft_vocab_size, spec.target_vocab_size)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `Head.fuse`."""
        if self._feature_norm is not None:
            features = self._feature_norm(features)
        if self._feature_norms:
            chunks = features.chunk(len(self._feature_norms), -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self._feature_norms, chunks, strict=True)], -1)
        return self._fc(features)

    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Head.forward`."""
        rotary = self._rotary(positions)
        normed = self._state_norm(g)
        first_input = torch.cat((self._embedding_norm(F.embedding(tokens, self._embedding)), normed), -1)
        residual = normed if self._norm_before_residual else g
        hidden = self._layers[0](first_input, residual, rotary, cache, batch)
        for norm, layer in zip(self._later_norms, self._layers[1:], strict=True):
            hidden = layer(norm(hidden), hidden, rotary, cache, batch)
        return self._norm(hidden) if self._norm_output else hidden

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """See `Head.logits`."""
        return F.linear(g if self._norm_output else self._norm(g), self._output)
