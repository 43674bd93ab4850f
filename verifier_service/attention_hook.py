"""Our attention in transformers' models: one registered function that reads the step's batch from a module context.

The models call it once per layer with rotary applied, key-value heads not repeated and a flattened ragged batch. No
mask function is registered, so transformers passes no mask. Keys and values are written and attention is computed by
one operator that a compiled graph sees as a whole: the graph knows neither cache nor batch, so it stays the same for
all of them, and the compiler cannot copy a cache that it does not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from draftwire.errors import CheckpointError
from draftwire.kv_cache import KVCache
from draftwire_kernels import RaggedBatch, paged_attention

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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    unknown = sorted(name for name, given in kwargs.items() if name not in _IGNORED and given is not None)
    if unknown or attention_mask is not None:
        raise CheckpointError(f"attention of {type(module).__name__} is not served: it needs {unknown or 'a mask'}")
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    out = torch.ops.draftwire.attend(*rows, module.layer_idx, scaling, sliding_window, softcap)
    return out[None], None


def _attend_in_step(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """query [T, H, D], key [T, KV, D] and value [T, KV, Dv] of a layer in the current step -> [T, H, Dv]."""
    if _step is None:
        raise RuntimeError("a forward pass outside of attending()")
    _step.layers_seen.append(layer)
    keys, values = _step.cache.keys[layer], _step.cache.values[layer]
    return paged_attention(query, key, value, keys, values, _step.batch, scale=scale, window=window, softcap=softcap)


def _attended_shape(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_library = torch.library.Library("draftwire", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int? window, float? softcap) -> Tensor"
)
_library.impl("attend", _attend_in_step, "CompositeExplicitAutograd")
torch.library.register_fake("draftwire::attend", _attended_shape, lib=_library)
AttentionInterface.register(NAME, _attend)
