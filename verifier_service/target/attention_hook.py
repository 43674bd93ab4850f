"""Paged attention in transformers' models: a registered function that reads the step's batch from a module variable.

Models call the function once per layer, after rotary embedding, with unrepeated key-value heads and a flattened ragged
batch. No mask function is registered, so transformers passes no mask. One operator writes keys and values and computes
attention. A compiled graph sees only the operator, neither cache nor batch. So one graph serves all batches, and the
compiler cannot copy the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from draftwire.contract.errors import CheckpointError
from draftwire.model.kv_cache import KVCache
from draftwire_kernels import RaggedBatch, paged_attention

NAME = "draftwire_paged"

# Arguments of models that have no effect here.
_IGNORED = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "is_causal",
    "cache_position",
    "output_router_logits",
}


class LayerCall(NamedTuple):
    """A layer's call of the attention function."""

    layer: int
    shape: tuple[int, int, int]  # KV heads, key head size, value head size
    window: int | None


# Query [T, H, D], key [T, KV, D], value [T, KV, Dv] of a layer, its number, scale, window, soft-cap -> [T, H, Dv].
_Attention = Callable[[Tensor, Tensor, Tensor, int, float, int | None, float | None], Tensor]
_attention: _Attention | None = None


@contextmanager
def attending(cache: KVCache, batch: RaggedBatch) -> Iterator[None]:
    """Let forward passes of this process use `cache` and `batch` while the context lasts."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        return paged_attention(query, key, value, keys, values, batch, scale=scale, window=window, softcap=softcap)

    with _by(attend):
        yield


@contextmanager
def measuring() -> Iterator[list[LayerCall]]:
    """Let forward passes of this process attend to nothing while the context lasts; yield their calls."""
    calls: list[LayerCall] = []

    def measure(
        query: Tensor, key: Tensor, value: Tensor, layer: int, _scale: float, window: int | None, _softcap: float | None
    ) -> Tensor:
        calls.append(LayerCall(layer, (key.shape[1], key.shape[2], value.shape[2]), window))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    with _by(measure):
        yield calls


@contextmanager
def _by(attention: _Attention) -> Iterator[None]:
    global _attention
    previous, _attention = _attention, attention
    try:
        yield
    finally:
        _attention = previous


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
    """Return [1, T, H, D] of query [1, H, T, D], key and value [1, KV, T, D]."""
    kind = type(module).__name__
    unknown = sorted(name for name, given in kwargs.items() if name not in _IGNORED and given is not None)
    if unknown or attention_mask is not None:
        raise CheckpointError(f"attention of {kind} is not served: it needs {', '.join(unknown) or 'a mask'}")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise CheckpointError(f"attention of {kind} is not served: it is not causal, rows see later rows")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if torch.compiler.is_compiling():
        # Parts of one tensor, so that earlier operations, above all rotary embedding, are one kernel for both.
        both, heads = torch.cat([query, key], 1), query.shape[1]
        query, key = both[:, :heads], both[:, heads:]
    out = torch.ops.draftwire.attend(query, key, value, module.layer_idx, scaling, sliding_window, softcap)
    return out[None], None


def _attend_in_step(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    if _attention is None:
        raise RuntimeError("a forward pass outside of attending()")
    return _attention(query, key, value, layer, scale, window, softcap)


def _attended_shape(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_library = torch.library.Library("draftwire", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int? window, float? softcap) -> Tensor"
)
_library.impl("attend", _attend_in_step, "CompositeExplicitAutograd")
torch.library.register_fake("draftwire::attend", _attended_shape, lib=_library)
AttentionInterface.register(NAME, _attend)
