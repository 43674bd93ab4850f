"""EAGLE-3: one state fused from several layers of the target, a first layer that reads [embedding, state]."""

from __future__ import annotations

import torch

from drafter_service.heads.chain import ChainHead
from drafter_service.heads.eagle_config import EagleConfig
from drafter_service.heads.layers import DecoderLayer, Projection, RMSNorm, Span
from drafter_service.heads.operations import first_input, rms_norm
from drafter_service.heads.rope import RotaryEmbedding
from drafter_service.heads.tensors import TensorSource
from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import KVCache, RaggedBatch


class Eagle3Head(ChainHead):
    """An EAGLE-3 head (arXiv 2503.01840), with the options of `EagleConfig`.

    A pass returns the state before the final norm. That state skips `fuse` in the next pass.
    """

    def __init__(
        self, config: EagleConfig, source: TensorSource, fingerprint: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.fingerprint = config.spec, fingerprint
        spec, hidden, eps = config.spec, config.spec.hidden_size, config.layer.norm_eps
        self._norm_before_residual, self._norm_output = config.norm_before_residual, config.norm_output
        self._embedding = source.embedding(spec.target_vocab_size, hidden)
        rotary = RotaryEmbedding(config.rope, dtype, device)
        feature_norms = []
        if config.norm_before_fc:
            feature_norms = [source.take("input_norm.weight", spec.feature_width)]
        if config.fc_norm:
            names = [f"fc_norm.{i}.weight" for i in range(len(spec.feature_layers))]
            feature_norms = [source.take(name, spec.target_hidden_size) for name in names]
        fc = source.take("fc.weight", hidden, spec.feature_width)
        self.fusion: FeatureFusion = FeatureFusion(fc, feature_norms, eps, rms_norm)
        self._embedding_norm = RMSNorm(source.take("layers.0.input_layernorm.weight", hidden), eps)
        self._state_norm = RMSNorm(source.take("layers.0.hidden_norm.weight", hidden), eps)
        self._layers = [
            DecoderLayer(source, config.layer, rotary, hidden if index else 2 * hidden, index, Span(window))
            for index, window in enumerate(config.windows)
        ]
        later = [f"layers.{index}.input_layernorm.weight" for index in range(1, len(self._layers))]
        self._later_norms = [RMSNorm(source.take(name, hidden), eps) for name in later]
        self._norm = RMSNorm(source.take("norm.weight", hidden), eps)
        same_vocabulary = spec.draft_vocab_size == spec.target_vocab_size
        self._output = Projection(source.output(spec.draft_vocab_size, hidden, shared=same_vocabulary))
        self.draft_token_ids = source.draft_vocabulary(spec.draft_vocab_size, spec.target_vocab_size)

    def use_fp8(self) -> None:
        self._layers[0].use_fp8(self._embedding_norm, self._state_norm)
        for norm, layer in zip(self._later_norms, self._layers[1:], strict=True):
            layer.use_fp8(norm)
        self._output.use_fp8(self._norm)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.fusion(features)

    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        norms = [(norm.weight, norm.eps) for norm in (self._embedding_norm, self._state_norm)]
        joined = first_input(tokens, self._embedding, norms[0], g, norms[1])
        residual = joined[:, g.shape[1] :] if self._norm_before_residual else g
        hidden = self._layers[0](joined, residual, positions, cache, batch)
        for norm, layer in zip(self._later_norms, self._layers[1:], strict=True):
            hidden = layer(norm(hidden), hidden, positions, cache, batch)
        return self._norm(hidden) if self._norm_output else hidden

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return self._output(g if self._norm_output else self._norm(g))
