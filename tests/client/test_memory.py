"""The memory use that a process reports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftwire.model.kv_cache import BLOCK_SIZE, KVCache
from draftwire.server.memory import measure_memory, peak_host_bytes

SHAPES = [(2, 8, 4), (1, 16, 16)]
CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_cache_position_has_keys_and_values_of_all_layers():
    cache = KVCache(SHAPES, 5, torch.bfloat16, CPU)
    use = measure_memory(cache, CPU, draft_logits=3, features=4)
    assert use.kv_cache_token_bytes == 2 * (2 * (8 + 4) + (16 + 16))
    assert use.kv_cache_tokens == 4 * BLOCK_SIZE  # without the padding block
    stored = sum(part.nbytes for part in (*cache.keys, *cache.values))
    assert stored == use.kv_cache_token_bytes * (use.kv_cache_tokens + BLOCK_SIZE)
    assert (use.draft_logits_bytes, use.features_bytes) == (3, 4)
    assert (use.peak_gpu_allocated_bytes, use.peak_gpu_reserved_bytes) == (0, 0)


def test_the_peak_stays_when_the_memory_is_given_back():
    before = peak_host_bytes()
    held = bytearray(before + 64 * MIB)
    del held
    assert peak_host_bytes() > before + 32 * MIB


@pytest.mark.gpu
def test_on_a_gpu_the_peaks_are_torchs():
    device = torch.device("cuda:0")
    cache = KVCache(SHAPES, 5000, torch.float32, device)
    use = measure_memory(cache, device)
    assert use.peak_gpu_allocated_bytes == torch.cuda.max_memory_allocated(device)
    assert use.peak_gpu_reserved_bytes == torch.cuda.max_memory_reserved(device)
    assert use.peak_gpu_reserved_bytes >= use.peak_gpu_allocated_bytes > use.kv_cache_token_bytes * use.kv_cache_tokens


def test_garbage_collection_skips_what_was_loaded():
    """Runs in a separate process, because garbage collection would skip all objects of this one."""
    code = (
        "import gc; from draftwire.server.memory import keep_what_is_loaded; loaded = [[]]\n"
        "assert any(one is loaded for one in gc.get_objects())\n"
        "keep_what_is_loaded()\n"
        "assert not any(one is loaded for one in gc.get_objects()) and gc.isenabled()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
