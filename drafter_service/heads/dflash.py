"""DFlash and DSpark: a block of drafts in one pass over mask tokens, which see the target's features and each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drafter_service.heads.block_config import BlockConfig
from drafter_service.heads.layers import DecoderLayer, Projection, RMSNorm
from drafter_service.heads.markov import ConfidenceHead, MarkovHead
from drafter_service.heads.operations import rms_norm, store_keys_
from drafter_service.heads.rope import RotaryEmbedding
from drafter_service.heads.spec import DraftContext, Head, Rows
from drafter_service.heads.tensors import TensorSource
from draftwire.contract.errors import CheckpointError
from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import KVCache, RaggedBatch


class DFlashHead(Head):
    """A DFlash head (arXiv 2602.06036), or a DSpark head (arXiv 2607.05147) with the parts in `markov`.

    The keys and values of row i are projections of g_i only; no token and no attention enters them. A block has
    `block_size` query slots from position n on: the anchor x_n, then mask tokens. The slots attend to rows 0 to n - 1
    and, as defined by `Span`, to each other.
    """

    def __init__(
        self, config: BlockConfig, source: TensorSource, fingerprint: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.fingerprint, self._config = config.spec, fingerprint, config
        spec, hidden, eps = config.spec, config.spec.hidden_size, config.layer.norm_eps
        self._embedding = source.embedding(spec.target_vocab_size, hidden)
        self._mask = self._take_mask(source)
        self._rotary = RotaryEmbedding(config.rope, dtype, device)
        self.fusion: FeatureFusion = FeatureFusion(source.take("fc.weight", hidden, spec.feature_width))
        self._state_norm = RMSNorm(source.take("hidden_norm.weight", hidden), eps)
        self._layers = [
            DecoderLayer(source, config.layer, self._rotary, hidden, index, span)
            for index, span in enumerate(config.spans)
        ]
        names = [f"layers.{index}.input_layernorm.weight" for index in range(len(self._layers))]
        self._input_norms = [RMSNorm(source.take(name, hidden), eps) for name in names]
        self._norm = RMSNorm(source.take("norm.weight", hidden), eps)
        same_vocabulary = spec.draft_vocab_size == spec.target_vocab_size
        self._output = Projection(source.output(spec.draft_vocab_size, hidden, shared=same_vocabulary))
        self.draft_token_ids = source.draft_vocabulary(spec.draft_vocab_size, spec.target_vocab_size)
        self._markov = MarkovHead(config, source) if config.markov_rank else None
        self._confidence = ConfidenceHead(config, source) if config.has_confidence else None
        # One product gives the context's keys and values of all layers.
        queries = config.layer.num_heads * config.layer.head_dim
        projections = [layer.attention.qkv for layer in self._layers]
        self._kv_weight = torch.cat([projection.weight[queries:] for projection in projections])
        biases = [projection.bias[queries:] for projection in projections if projection.bias is not None]
        self._kv_bias = torch.cat(biases) if biases else None

    def use_fp8(self) -> None:
        for norm, layer in zip(self._input_norms, self._layers, strict=True):
            layer.use_fp8(norm)
        self._output.use_fp8(self._norm)

    def _take_mask(self, source: TensorSource) -> torch.Tensor:
        """Return the embedding of a mask token, [hidden]: the checkpoint's mask embedding, else that of the token."""
        own = source.mask_embedding(self.spec.hidden_size)
        if own is not None:
            return own
        if self._config.mask_token_id is None:
            raise CheckpointError("the head has neither a mask_token_id in its config.json nor a mask embedding")
        return self._embedding[self._config.mask_token_id]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.fusion(features)

    def enter(self, rows: Rows, states: torch.Tensor, cache: KVCache) -> None:
        layer, count = self._config.layer, len(self._layers)
        kv = F.linear(self._state_norm(states), self._kv_weight, self._kv_bias)
        kv = kv.unflatten(-1, (count, 2, layer.num_kv_heads, layer.head_dim))
        for index, own in enumerate(self._layers):
            norms = own.attention.qk_norms
            store_keys_(
                kv[:, index],
                rows.positions,
                rows.batch.slot_mapping,
                self._rotary.cosines,
                self._rotary.sines,
                None if norms is None else norms[1:],
                cache.keys[index],
                cache.values[index],
            )

    def forward(
        self, anchors: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """Run one pass over the blocks of N sequences and write their slots' keys and values into `cache`.

        Args:
            anchors: [N] int64, the last committed token of each sequence.
            positions: [N * block_size] int64, rotary positions of the slots.

        Returns:
            [N, block_size, hidden], after the final norm.
        """
        size = self._config.block_size
        slots = self._mask.repeat(len(anchors), size, 1)
        slots[:, 0] = F.embedding(anchors, self._embedding)
        hidden = slots.flatten(0, 1)
        for norm, layer in zip(self._input_norms, self._layers, strict=True):
            hidden = layer(norm(hidden), hidden, positions, cache, batch)
        return rms_norm(hidden, self._norm.weight, self._norm.eps).unflatten(0, (-1, size))

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of states as one product, [num_drafts, N, hidden] -> [num_drafts, N, V_draft].

        The product has a multiple of 8 rows: for 7 rows of 151936 logits cuBLAS takes 2.0 ms on an H200.
        """
        flat = states.flatten(0, 1)
        logits = self._output(F.pad(flat, (0, 0, 0, -len(flat) % 8)))
        return logits[: len(flat)].unflatten(0, states.shape[:2])

    def draft(self, context: DraftContext, num_drafts: int) -> None:
        """Compute drafts; the block always has all slots, even if fewer drafts are sampled."""
        self.enter(context.rows, context.states, context.cache)
        anchors = context.rows.tokens[context.last_rows]
        block = context.block(self._config.block_size)
        hidden = self.forward(anchors, block.positions, context.cache, block.batch).transpose(0, 1)
        first = 0 if self._config.samples_anchor else 1
        states = hidden[first : first + num_drafts].contiguous()
        logits = self._logits(states)
        token, latent_state = anchors, None
        if self._markov is not None:
            latent_state = self._markov.start(len(anchors))
            if first:  # the recurrent state also passes the anchor's slot, which predicts nothing
                latent_state = self._markov.step(self._markov.embed(anchors), hidden[0], latent_state)[1]
        for offset in range(num_drafts):
            own, embedded = logits[offset], None
            if self._markov is not None:
                assert latent_state is not None
                embedded = self._markov.embed(token)
                latent, latent_state = self._markov.step(embedded, states[offset], latent_state)
                own = self._markov.add_bias(own, latent)
            confidences = None
            if self._confidence is not None and context.wants_confidences:
                confidences = self._confidence(states[offset], embedded)
            token = context.draw(offset, own, confidences)
