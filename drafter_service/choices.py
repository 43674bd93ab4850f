"""The limits that follow from the options, the head, the target and the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from drafter_service.heads.spec import HeadSpec
from drafter_service.limits import EngineLimits
from drafter_service.options import DrafterOptions
from draftwire.checkpoints import read_config
from draftwire.devices import free_memory
from draftwire.errors import InvalidArgumentError
from draftwire.kv_cache import BLOCK_SIZE

CPU_KV_CACHE_TOKENS = 65536
# The rest is for activations, draft logits and whoever shares the device.
CUDA_KV_CACHE_SHARE = 0.5


def choose_limits(
    options: DrafterOptions, spec: HeadSpec, dtype: torch.dtype, device: torch.device, target_dir: Path
) -> EngineLimits:
    """The limits that were asked for, the others such that the head's and the device's are kept.

    Raises
    ------
    InvalidArgumentError
        Names the limit that is out of range.
    """
    longest = spec.max_position_embeddings
    target_longest = read_config(target_dir).get("max_position_embeddings")
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = min(longest, target_longest) if isinstance(target_longest, int) else longest
    elif max_model_len > longest:
        raise InvalidArgumentError("max_model_len", max_model_len, f"the head's positions end at {longest}")
    kv_cache_tokens = options.kv_cache_tokens
    if kv_cache_tokens is None:
        # Room for a last, partly filled block of each sequence and for its speculative rows.
        useful = options.max_num_seqs * (max_model_len + BLOCK_SIZE)
        kv_cache_tokens = min(useful, _affordable_tokens(spec, dtype, device))
    return EngineLimits(
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        max_num_speculative_tokens=options.max_num_speculative_tokens,
        max_batch_rows=options.max_batch_rows,
        max_sessions=options.max_sessions,
    )


def _affordable_tokens(spec: HeadSpec, dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_KV_CACHE_TOKENS
    token_bytes = sum(heads * (key + value) for heads, key, value in spec.layer_shapes) * dtype.itemsize
    return int(free_memory(device) * CUDA_KV_CACHE_SHARE) // token_bytes
