"""What follows from the options, the head, the target and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafter_service.heads.spec import HeadSpec
from drafter_service.limits import EngineLimits
from drafter_service.options import DrafterOptions
from draftwire.checkpoints import read_config
from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.kv_cache import BLOCK_SIZE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_KV_CACHE_TOKENS = 65536
# The rest is for activations, draft logits and whoever shares the device.
CUDA_KV_CACHE_SHARE = 0.5


def choose_device(name: str | None) -> torch.device:
    """The device of a name such as "cpu" or "cuda:1"; CUDA by default where there is some.

    Raises
    ------
    InvalidArgumentError
        When it is not a name of a device.
    ServerError
        When this machine has no such device.
    """
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (name == "cuda" or (index.isascii() and index.isdigit()))):
        raise InvalidArgumentError("device", name, "allowed: cpu, cuda, cuda:INDEX")
    if name == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise ServerError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", int(index or 0))


def choose_dtype(name: str, device: torch.device, target_dir: Path) -> torch.dtype:
    """The compute type: for "auto" float32 on the CPU, else the target's own 16-bit type.

    Raises
    ------
    InvalidArgumentError
        When it is not a type that heads compute in.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise InvalidArgumentError("dtype", name, f"allowed: auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if _target_dtype(read_config(target_dir)) == "float16" else torch.bfloat16


def _target_dtype(config: dict[str, Any]) -> str:
    """`dtype`, or `torch_dtype` as older files call it."""
    return str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")


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
    free_bytes, _ = torch.cuda.mem_get_info(device)
    token_bytes = sum(heads * (key + value) for heads, key, value in spec.layer_shapes) * dtype.itemsize
    return int(free_bytes * CUDA_KV_CACHE_SHARE) // token_bytes
