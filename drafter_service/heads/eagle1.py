"""EAGLE-1 and EAGLE-2: the state is the target's last, joined with the embedding before the first layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drafter_service.heads.chain import ChainHead
from drafter_service.heads.eagle_config import EagleConfig
from drafter_service.heads.layers import DecoderLayer, Linear, Projection, RMSNorm, Span
from drafter_service.heads.rope import RotaryEmbedding
from drafter_service.heads.tensors import TensorSource
from draftwire.model.kv_cache import KVCache, RaggedBatch


class Eagle1Head(ChainHead):
    """An EAGLE-1/2 head (arXiv 2401.15077, 2406.16858).

    The first layer has no input norm and there is no final norm: the head predicts the target's normed state, which the
    target's lm_head reads directly.
    """

    def __init__(
        self, config: EagleConfig, source: TensorSource, fingerprint: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.fingerprint, self.draft_token_ids = config.spec, fingerprint, None
        spec, hidden = config.spec, config.spec.hidden_size
        self._embedding = source.embedding(spec.target_vocab_size, hidden)
        rotary = RotaryEmbedding(config.rope, dtype, device)
        self._fc = Linear(source, ["fc"], [hidden], 2 * hidden, bias=bool(config.fc_bias))
        self._layers = [
            DecoderLayer(source, config.layer, rotary, hidden, index, Span(window))
            for index, window in enumerate(config.windows)
        ]
        later = [f"layers.{index}.input_layernorm.weight" for index in range(1, len(self._layers))]
        self._later_norms = [RMSNorm(source.take(name, hidden), config.layer.norm_eps) for name in later]
        self._output = Projection(source.output(spec.target_vocab_size, hidden, shared=True))

    def use_fp8(self) -> None:
        """See `Head.use_fp8`. The inputs of the first layer's attention and of lm_head are not normed."""
        self._layers[0].use_fp8()
        for norm, layer in zip(self._later_norms, self._layers[1:], strict=True):
            layer.use_fp8(norm)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features, which are the states."""
        return features

    def forward(
        self, tokens: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        hidden = self._fc(torch.cat((F.embedding(tokens, self._embedding), g), -1))
        hidden = self._layers[0](hidden, hidden, positions, cache, batch)
        for norm, layer in zip(self._later_norms, self._layers[1:], strict=True):
            hidden = layer(norm(hidden), hidden, positions, cache, batch)
        return hidden

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return self._output(g)
