"""The memory of a service's process, as its info call reports it."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.kv_cache import KVCache, LayerShapes, token_bytes
from draftwire.v1 import draft_pb2 as pb

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_host_bytes() -> int:
    """Return the peak resident set of this process in bytes; 0 if /proc cannot be read, as without free descriptors.

    getrusage's ru_maxrss is unsuitable, because a new process inherits its parent's peak.
    """
    try:
        found = _PEAK.search(Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def check_cache_fits(num_tokens: int, layer_shapes: LayerShapes, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a number of cache positions that exceeds the whole memory of the device.

    Raises:
        InvalidArgumentError: If it does; the error has the bytes needed and the bytes of the device.
    """
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[1]
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = num_tokens * token_bytes(layer_shapes, dtype)
    if needed > room:
        allowed = f"takes {needed / 2**30:.2f} GiB, but {device} has {room / 2**30:.2f} GiB of memory"
        raise InvalidArgumentError("kv_cache_tokens", num_tokens, allowed)


def keep_what_is_loaded() -> None:
    """Exclude all present objects from garbage collection, which stops all threads. A model lives as long as the
    process."""
    gc.collect()
    gc.freeze()


def measure_memory(cache: KVCache, device: torch.device, *, draft_logits: int = 0, features: int = 0) -> pb.MemoryUse:
    """Return the memory of a service's process with this cache; `draft_logits` and `features` in bytes."""
    use = pb.MemoryUse(
        kv_cache_token_bytes=cache.token_bytes,
        kv_cache_tokens=cache.num_tokens,
        draft_logits_bytes=draft_logits,
        features_bytes=features,
        peak_host_bytes=peak_host_bytes(),
    )
    if device.type == "cuda":
        # max_memory_allocated and max_memory_reserved return the same, but sort all statistics at each call.
        figures = torch.cuda.memory_stats_as_nested_dict(device)
        use.peak_gpu_allocated_bytes = figures["allocated_bytes"]["all"]["peak"]
        use.peak_gpu_reserved_bytes = figures["reserved_bytes"]["all"]["peak"]
    return use
