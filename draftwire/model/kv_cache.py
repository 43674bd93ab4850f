"""Paged key-value memory, shared by the target and the heads.

A cache is a pool of blocks of `BLOCK_SIZE` slots. A sequence owns a list of blocks. Roll-back shortens the sequence;
rows past its length are overwritten. Block 0 belongs to no sequence: padding is written there and never read. A
`RaggedBatch` has the slots that a batch writes and reads; `draftwire_kernels.paged_attention` reads them.
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
    """Return the bytes of the keys and values of one position in all layers."""
    return sum(heads * (key + value) for heads, key, value in layer_shapes) * dtype.itemsize


def zeros_for_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros for a large cache. In host memory each page is allocated when it is first written.

    Raises:
        RuntimeError, MemoryError: If there is not enough memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write all pages; numpy gets zeroed pages from the system.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def allocate_cache(layer_shapes: LayerShapes, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Allocate the cache of a service.

    Raises:
        ServerError: If there is not enough memory.
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
        token_bytes: Bytes of one position in all layers.
        num_tokens: Positions available to sequences.
    """

    def __init__(self, layer_shapes: LayerShapes, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        slots = num_blocks * BLOCK_SIZE
        self.token_bytes = token_bytes(layer_shapes, dtype)
        self.num_tokens = slots - BLOCK_SIZE  # without the padding block
        self.keys = [zeros_for_cache((slots, heads, k), dtype, device) for heads, k, _ in layer_shapes]
        self.values = [zeros_for_cache((slots, heads, v), dtype, device) for heads, _, v in layer_shapes]
