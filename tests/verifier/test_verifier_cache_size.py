"""The size of the verifier's cache: from an option or the memory left, and at least one request of full length."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_scene import HIDDEN, NUM_LAYERS
from tiny_targets import CONTEXT

from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import GpuMemory
from draftwire.model.kv_cache import BLOCK_SIZE, zeros_for_cache
from verifier_service.host import kv_sizing
from verifier_service.host.kv_sizing import CPU_KV_CACHE_BYTES, choose_num_blocks, run_largest_step
from verifier_service.options import VerifierOptions
from verifier_service.target.target import Target

GIB = 2**30
DEVICE = torch.device("cuda", 0)
# Keys and values of one head of size 8 in every layer, float32.
KV_BLOCK_BYTES = NUM_LAYERS * 2 * (HIDDEN // 2) * 4 * BLOCK_SIZE
STATE_BLOCK_BYTES = HIDDEN * 4 * BLOCK_SIZE
FUSION_BYTES = 3 * HIDDEN * HIDDEN * 4


class FakeGpu:
    """Fakes of the memory functions of `torch.cuda`, for a GPU with 100 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, foreign: int = 0) -> None:
        self.foreign = foreign  # bytes used by other processes and by libraries
        self.reserved = 0
        self.peak = 0
        for name, answer in {
            "mem_get_info": lambda _: (100 * GIB - self.foreign - self.reserved, 100 * GIB),
            "memory_reserved": lambda _: self.reserved,
            "max_memory_reserved": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: None,
            "empty_cache": lambda: None,
            "synchronize": lambda _: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def take(self, size: int) -> None:
        self.reserved += size
        self.peak = max(self.peak, self.reserved)


class FixedMemory(GpuMemory):
    """A GPU with a fixed number of bytes left for the cache, whatever the step allocates."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.utilization = 0.0

    def left_for_cache(self, utilization: float, largest_step: Callable[[], object]) -> int:
        self.utilization = utilization
        largest_step()
        return self.left


def choose(target: Target, memory: GpuMemory | None = None, **options: Any) -> int:
    config = speculative_config_from_mapping({"num_speculative_tokens": 3})
    return choose_num_blocks(target, config, VerifierOptions("tiny", **options), memory)


# Memory left on a GPU.


@pytest.mark.parametrize(
    ("foreign", "libraries", "utilization", "step", "left"),
    [
        (5, 1, 0.9, 2, 90 - 16 - 1 - 2 * 2),
        (40, 0, 0.3, 0, 30 - 16),
        (40, 0, 0.9, 2, 100 - 40 - 16 - 2 * 2),  # memory of other processes is not given to the cache
        (0, 0, 0.1, 0, 0),  # the weights fill the share
    ],
)
def test_the_cache_gets_what_others_and_activations_leave(monkeypatch, foreign, libraries, utilization, step, left):
    """In GiB: memory of other processes, of libraries loaded with the model, of the largest step, and of the cache."""
    gpu = FakeGpu(monkeypatch, foreign * GIB)
    memory = GpuMemory(DEVICE)
    gpu.take(16 * GIB)
    gpu.foreign += libraries * GIB
    assert memory.left_for_cache(utilization, lambda: gpu.take(step * GIB)) == left * GIB


def test_a_largest_step_that_does_not_fit_is_described(monkeypatch):
    FakeGpu(monkeypatch)

    def step() -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    with pytest.raises(ServerError, match=r"cuda:0: no memory for the largest step .*: tried to allocate 9 GiB"):
        GpuMemory(DEVICE).left_for_cache(0.9, step)


# Number of blocks.


def test_a_number_of_tokens_wins(target):
    assert choose(target, kv_cache_tokens=100) == blocks_for(100) + 1
    assert choose(target, FixedMemory(0), kv_cache_tokens=100) == blocks_for(100) + 1


def test_a_cpus_cache_is_what_requests_can_use_up_to_a_limit(target):
    assert choose(target, max_num_seqs=2) == 2 * blocks_for(CONTEXT) + 1
    most = CPU_KV_CACHE_BYTES // KV_BLOCK_BYTES
    assert most < 10**6 * blocks_for(CONTEXT)
    assert choose(target, max_num_seqs=10**6) == most + 1


def test_features_are_part_of_the_cache_of_a_cpu(target):
    fused, raw = (CPU_KV_CACHE_BYTES // (KV_BLOCK_BYTES + states * STATE_BLOCK_BYTES) for states in (1, 3))
    assert choose(target, max_num_seqs=10**6, drafters="localhost:1") == fused + 1
    assert choose(target, max_num_seqs=10**6, drafters="localhost:1", fuse_features=False) == raw + 1


def test_the_cache_of_a_cpu_holds_one_request_and_warns(target, monkeypatch, caplog):
    monkeypatch.setattr(kv_sizing, "CPU_KV_CACHE_BYTES", KV_BLOCK_BYTES)
    assert choose(target) == blocks_for(CONTEXT) + 1
    assert f"one request of max_model_len = {CONTEXT} positions needs a cache of " in caplog.text
    assert "a lower --max-model-len makes it smaller" in caplog.text


def test_the_cache_of_a_cpu_takes_pages_when_they_are_written():
    before = resident_bytes()
    rows = zeros_for_cache((2**24, 8), torch.float32, torch.device("cpu"))  # 512 MiB
    assert resident_bytes() - before < rows.nbytes // 8
    rows[-1] = 1
    assert (rows[0].sum(), rows[-1].sum()) == (0, 8)
    assert zeros_for_cache((3, 2), torch.bfloat16, torch.device("cpu")).dtype == torch.bfloat16


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_gpus_cache_leaves_room_for_the_features_beside_it(target):
    raw = FixedMemory(10 * (KV_BLOCK_BYTES + 3 * STATE_BLOCK_BYTES))
    assert choose(target, raw, drafters="localhost:1", gpu_memory_utilization=0.7, fuse_features=False) == 10
    assert raw.utilization == 0.7
    fused = FixedMemory(10 * (KV_BLOCK_BYTES + STATE_BLOCK_BYTES) + FUSION_BYTES)
    assert choose(target, fused, drafters="localhost:1") == 10
    assert choose(target, FixedMemory(10 * KV_BLOCK_BYTES)) == 10


def test_a_gpus_cache_is_no_larger_than_all_requests_can_use(target):
    assert choose(target, FixedMemory(GIB), max_num_seqs=3) == 3 * blocks_for(CONTEXT) + 1


def test_a_cache_that_holds_no_request_of_full_length_is_refused(target):
    assert choose(target, FixedMemory((blocks_for(CONTEXT) + 1) * KV_BLOCK_BYTES)) == blocks_for(CONTEXT) + 1
    with pytest.raises(InvalidArgumentError) as caught:
        choose(target, FixedMemory(blocks_for(CONTEXT) * KV_BLOCK_BYTES))
    assert str(caught.value) == (
        "gpu_memory_utilization = 0.9: leaves a cache of 48 positions, which must hold one request of max_model_len = "
        "64 positions; free memory of the GPU, or lower max_model_len, max_num_seqs or max_prefill_rows"
    )
    with pytest.raises(InvalidArgumentError, match="kv_cache_tokens = 48: must hold one request of max_model_len = 64"):
        choose(target, kv_cache_tokens=48)


# The largest step.


@pytest.mark.parametrize("draft_logits", [None, "dense", {"top_n": 4}], ids=["none", "dense", "top_n"])
def test_the_largest_step_has_all_drafts_and_a_full_prefill(target, monkeypatch, draft_logits):
    mapping = {"num_speculative_tokens": 3}
    if draft_logits is not None:
        mapping |= {"draft_sample_method": "gumbel", "draft_logits": draft_logits}
    shapes = []
    forward = target.forward

    def record(token_ids: torch.Tensor, positions: torch.Tensor, cache: Any, batch: Any, rows: torch.Tensor) -> Any:
        shapes.append((token_ids.shape[0], int(positions.max()), rows.shape[0]))
        return forward(token_ids, positions, cache, batch, rows)

    monkeypatch.setattr(target, "forward", record)
    options = VerifierOptions("tiny", max_num_seqs=5, max_prefill_rows=2 * CONTEXT + 3)
    run_largest_step(target, speculative_config_from_mapping(mapping), options)
    assert shapes == [(5 * 4 + 2 * CONTEXT + 3, CONTEXT - 1, 5 * 4)]
