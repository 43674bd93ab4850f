"""Our attention in transformers' models: one registered function that reads the step's batch from a module context.

The models call it once per layer with rotary applied, key-value heads not repeated and a flattened ragged batch. No
mask function is registered, so transformers passes no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from draftwire.errors import CheckpointError
from draftwire.kv_cache import KVCache, RaggedBatch, paged_attention

NAME = "draftwire_paged"

# Arguments that models pass along without any effect on the result here.
_IGNORED = {"dropout", "position_ids", "use_cache", "output_attentions", "is_causal", "cache_position"}


@dataclass
class _Step:
    cache: KVCache
    batch: RaggedBatch
    layers_seen: list[int]


_step: _Step | None = None


@contextmanager
def attending(cache: KVCache, batch: RaggedBatch) -> Iterator[list[int]]:
    """Within it, forward passes of this process use `cache` and `batch`; yields the layers that attended, in order."""
    global _step
    previous, _step = _step, _Step(cache, batch, [])
    try:
        yield _step.layers_seen
    finally:
        _step = previous


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    unknown = sorted(name for name, given in kwargs.items() if name not in _IGNORED and given is not None)
    if unknown or attention_mask is not None:
        raise CheckpointError(f"attention of {type(module).__name__} is not served: it needs {unknown or 'a mask'}")
    assert _step is not None, "forward pass outside of attending()"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _step.layers_seen.append(layer)
    out = paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _step.cache.keys[layer],
        _step.cache.values[layer],
        _step.batch,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


AttentionInterface.register(NAME, _attend)
