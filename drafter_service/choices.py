"""Choice of the engine's limits from the options, the head, the target and the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.loop import DraftLoop, LoopShape
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.heads.reader import text_config
from drafter_service.heads.spec import Head, HeadSpec, Rows
from drafter_service.limits import EngineLimits
from drafter_service.options import DEFAULT_SPECULATIVE_TOKENS, DrafterOptions
from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.block_pool import blocks_for
from draftwire.model.checkpoints import read_config
from draftwire.model.devices import GpuMemory, upload
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, RaggedBatch, SequenceRows, token_bytes
from draftwire.server.memory import check_cache_fits

CPU_KV_CACHE_TOKENS = 65536


def choose_limits(
    options: DrafterOptions,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    target_dir: Path,
    memory: GpuMemory | None,
) -> EngineLimits:
    """Return the requested limits; limits left open follow from the head, the target and the device.

    Args:
        memory: The device's memory, created before the head was loaded; None on a CPU.

    Raises:
        InvalidArgumentError: If a limit is out of range.
        ServerError: If there is not enough memory for the largest step.
    """
    max_model_len = _choose_max_model_len(options, head.spec, target_dir)
    # Room for a last, partly filled block of each sequence and for its speculative rows.
    useful = options.max_num_seqs * (max_model_len + BLOCK_SIZE)
    tokens = options.kv_cache_tokens
    if tokens is not None:
        check_cache_fits(tokens, head.spec.layer_shapes, dtype, device)
    elif memory is None:
        tokens = min(useful, CPU_KV_CACHE_TOKENS)
    else:
        left = memory.left_for_cache(
            options.gpu_memory_utilization, lambda: run_largest_step(head, options, max_model_len, dtype, device)
        )
        tokens = min(useful, left // token_bytes(head.spec.layer_shapes, dtype) - BLOCK_SIZE)  # one block is padding
        if tokens < max_model_len:
            raise InvalidArgumentError(
                "gpu_memory_utilization",
                options.gpu_memory_utilization,
                f"leaves a cache of {max(tokens, 0)} positions, which must hold a sequence of max_model_len = "
                f"{max_model_len}; free memory of the GPU, or lower max_model_len, max_num_seqs or max_batch_rows",
            )
    return EngineLimits.from_options(options, max_model_len=max_model_len, kv_cache_tokens=tokens)


def _choose_max_model_len(options: DrafterOptions, spec: HeadSpec, target_dir: Path) -> int:
    longest = spec.max_position_embeddings
    if options.max_model_len is None:
        target_longest = text_config(read_config(target_dir)).get("max_position_embeddings")
        return min(longest, target_longest) if isinstance(target_longest, int) else longest
    if options.max_model_len > longest:
        raise InvalidArgumentError("max_model_len", options.max_model_len, f"the head's positions end at {longest}")
    return options.max_model_len


@torch.inference_mode()
def run_largest_step(
    head: Head, options: DrafterOptions, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compute as many rows as a batch may have, then a step of the most sequences with the default number of drafts."""
    limits = EngineLimits.from_options(options, max_model_len=max_model_len).fit(head.spec.max_drafts)
    cache = KVCache(head.spec.layer_shapes, 2, dtype, device)
    _enter_most_rows(head, cache, limits, dtype, device)
    k = min(DEFAULT_SPECULATIVE_TOKENS, limits.max_num_speculative_tokens)
    mode, count = SamplingMode(gumbel=True, dense=True), limits.max_num_seqs
    buffers = LogitsBuffers(count, head.spec.draft_vocab_size, device)
    buffers.keep([SessionTerms("largest step", mode, k, count)])
    loop = DraftLoop(head, cache, buffers, limits, dtype, device)
    num_rows = count * (k + 1)
    features = torch.zeros(num_rows, head.spec.feature_width, dtype=dtype, device=device)
    loop.states[:num_rows] = head.fuse(features)
    loop.inputs.clear(count, num_rows)
    loop.run(LoopShape(mode, count, num_rows, k + 1, k))


def _enter_most_rows(
    head: Head, cache: KVCache, limits: EngineLimits, dtype: torch.dtype, device: torch.device
) -> None:
    most = max(limits.max_batch_rows, limits.max_num_seqs * (limits.max_num_speculative_tokens + 1))
    whole, rest = divmod(most, limits.max_model_len)
    counts = [limits.max_model_len] * whole + [rest] * (rest > 0)
    # All rows write to one block, because their contents do not matter.
    batch = RaggedBatch([SequenceRows([1] * blocks_for(rows), 0, rows) for rows in counts], device)
    positions = np.concatenate([np.arange(rows) for rows in counts])
    tokens, given_positions = upload([np.zeros(len(positions), np.int64), positions], device)
    rows = Rows(tokens, given_positions, batch)
    features = torch.zeros(len(positions), head.spec.feature_width, dtype=dtype, device=device)
    head.enter(rows, head.fuse(features), cache)
