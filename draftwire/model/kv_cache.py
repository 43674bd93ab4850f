"""Paged key-value memory, shared by the target and the heads.

A cache is a pool of blocks of `BLOCK_SIZE` slots; a sequence owns a list of blocks, and roll-back is a shorter length:
rows past it are overwritten. Block 0 belongs to nobody: padding is written there, and nothing reads it. What a batch
writes and reads is a `RaggedBatch`, what reads it `draftwire_kernels.paged_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from draftwire.contract.errors import ServerError
from draftwire_kernels.ragged_batch import BLOCK_SIZE, BatchBuffers, RaggedBatch, SequenceRows

__all__ = [
    "BLOCK_SIZE",
    "BatchBuffers",
    "KVCache",
    "RaggedBatch",
    "SequenceRows",
    "allocate_cache",
    "token_bytes",
    "zeros_for_cache",
]

LayerShapes = Sequence[tuple[int, int, int]]  # (kv_heads, key head size, value head size) of each layer


def token_bytes(layer_shapes: LayerShapes, dtype: torch.dtype) -> int:
    """Return the keys and values of one position in all layers, bytes."""
    return sum(heads * (key + value) for heads, key, value in layer_shapes) * dtype.itemsize


def zeros_for_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of a large cache. In host memory each page is taken when it is first written.

    Raises:
        RuntimeError, MemoryError: If there is no memory for it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write all pages; numpy takes zeroed ones from the system.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def allocate_cache(layer_shapes: LayerShapes, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Allocate the cache of a service.

    Raises:
        ServerError: If there is no memory for it.
    """
    try:
        return KVCache(layer_shapes, num_blocks, dtype, device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        tokens = num_blocks * BLOCK_SIZE
        size = tokens * token_bytes(layer_shapes, dtype) / 2**30
        text = f"{device}: no memory for a cache of {tokens} positions, {size:.2f} GiB; lower kv_cache_tokens ({error})"
        raise ServerError(text) from error


class KVCache:
    """Keys and values of every layer: per layer one tensor [num_blocks * BLOCK_SIZE, kv_heads, head_size] each.

    Attributes:
        token_bytes: Of one position in all layers.
        num_tokens: Positions that sequences can have.
    """

    def __init__(
        self,
        layer_shapes: LayerShapes,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        slots = num_blocks * BLOCK_SIZE
        self.token_bytes = token_bytes(layer_shapes, dtype)
        self.num_tokens = slots - BLOCK_SIZE  # without the padding's
        self.keys = [zeros_for_cache((slots, heads, k), dtype, device) for heads, k, _ in layer_shapes]
        self.values = [zeros_for_cache((slots, heads, v), dtype, device) for heads, _, v in layer_shapes]
