"""The number of blocks in the verifier's cache."""

from __future__ import annotations

import logging

import numpy as np
import torch

from draftwire.contract import validation as cfg
from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import GpuMemory
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache, SequenceRows, token_bytes
from draftwire.server.memory import check_cache_fits
from draftwire.v1 import config_pb2
from verifier_service.core.batch import ForwardInput, ScheduledRows
from verifier_service.core.request import AnswerLogits, NoiseKeys, ReadyDrafts, Request
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.options import VerifierOptions
from verifier_service.sampling.sampler import TokenSampler
from verifier_service.target.runner import TargetRunner
from verifier_service.target.target import Target

logger = logging.getLogger(__name__)

# Bytes of a CPU's default cache, including features.
CPU_KV_CACHE_BYTES = 2**30
# Width of the features stored beside the cache, in hidden sizes: EAGLE-3 reads three states, or one fused state.
FEATURE_STATES = 3
FUSED_STATES = 1


def choose_num_blocks(
    target: Target, config: config_pb2.SpeculativeConfig, options: VerifierOptions, memory: GpuMemory | None
) -> int:
    """Return the number of cache blocks, including the padding block: at most as many as all requests can use.

    Args:
        memory: Memory of the target's GPU before the target was loaded; None on a CPU.

    Raises:
        InvalidArgumentError: If not even one request of full length fits.
        ServerError: If there is not enough memory for the largest step.
    """
    longest = target.max_model_len
    if options.kv_cache_tokens is not None:
        check_cache_fits(options.kv_cache_tokens, target.layer_shapes, target.dtype, target.device)
        blocks = blocks_for(options.kv_cache_tokens)
    else:
        blocks = options.max_num_seqs * blocks_for(longest)
        states = 0
        if options.drafters:
            states = FUSED_STATES if options.fuse_features else FEATURE_STATES
        block_bytes = _block_bytes(target, states)
        if memory is None:
            blocks = min(blocks, _cpu_blocks(longest, block_bytes))
        else:
            left = memory.left_for_cache(
                options.gpu_memory_utilization, lambda: run_largest_step(target, config, options)
            )
            left -= _fusion_bytes(target) if states == FUSED_STATES else 0
            blocks = min(blocks, left // block_bytes - 1)
    if blocks < blocks_for(longest):
        allowed = f"must hold one request of max_model_len = {longest} positions"
        if options.kv_cache_tokens is not None:
            raise InvalidArgumentError("kv_cache_tokens", options.kv_cache_tokens, allowed)
        raise InvalidArgumentError(
            "gpu_memory_utilization",
            options.gpu_memory_utilization,
            f"leaves a cache of {max(blocks, 0) * BLOCK_SIZE} positions, which {allowed}; free memory of the GPU, or "
            "lower max_model_len, max_num_seqs or max_prefill_rows",
        )
    return blocks + 1


def _cpu_blocks(longest: int, block_bytes: int) -> int:
    """Return the most blocks of a CPU's default cache, which always has room for one request of full length."""
    needed = blocks_for(longest)
    if needed * block_bytes > CPU_KV_CACHE_BYTES:
        logger.warning(
            "one request of max_model_len = %d positions needs a cache of %.2f GiB, more than the %.2f GiB that a CPU "
            "has by default; a lower --max-model-len makes it smaller",
            *(longest, needed * block_bytes / 2**30, CPU_KV_CACHE_BYTES / 2**30),
        )
    return max(CPU_KV_CACHE_BYTES // block_bytes, needed)


def _block_bytes(target: Target, feature_states: int) -> int:
    features = feature_states * target.hidden_size * target.dtype.itemsize
    return (token_bytes(target.layer_shapes, target.dtype) + features) * BLOCK_SIZE


def _fusion_bytes(target: Target) -> int:
    """Return the bytes of one head's fusion weights."""
    return FUSED_STATES * FEATURE_STATES * target.hidden_size**2 * target.dtype.itemsize


def run_largest_step(target: Target, config: config_pb2.SpeculativeConfig, options: VerifierOptions) -> None:
    """Verify all drafts of max_num_seqs requests beside max_prefill_rows rows of prompts, with masks and filters."""
    device = target.device
    num_drafts = config.num_speculative_tokens
    counts = [num_drafts + 1] * options.max_num_seqs
    whole, rest = divmod(options.max_prefill_rows, target.max_model_len)
    counts += [target.max_model_len] * whole + [rest] * (rest > 0)
    # All rows write to the same block, because their values do not matter.
    num_logit_rows = (num_drafts + 1) * options.max_num_seqs
    step = ForwardInput(
        np.zeros(sum(counts), np.int64),
        np.concatenate([np.arange(count) for count in counts]),
        [SequenceRows([1] * blocks_for(count), 0, count) for count in counts],
        np.arange(num_logit_rows),
    )
    cache = KVCache(target.layer_shapes, 2, target.dtype, device)
    longest = blocks_for(target.max_model_len)
    runner = TargetRunner(target, cache, options.max_num_seqs, num_drafts + 1, options.max_prefill_rows, longest)
    output = runner.run(step)
    output.features([0] * FEATURE_STATES)
    sampler = TokenSampler(config, target.vocab_size, target.eos_token_ids, options.max_num_seqs, device)
    sampler.finish(sampler.launch(_verify_works(target, config, options.max_num_seqs), output.logits))


def _verify_works(target: Target, config: config_pb2.SpeculativeConfig, count: int) -> list[ScheduledRows]:
    params = cfg.resolve_sampling_params(
        cfg.build_sampling_params(
            temperature=1.0,
            top_k=2,
            top_p=0.5,
            min_p=0.01,
            frequency_penalty=0.1,
            logprobs=1,
            allowed_token_ids=[0, 1],
            bad_word_ids=[[0, 1]],
        )
    )
    num_drafts = config.num_speculative_tokens
    form = config.draft_logits.form
    logits = None
    if form != cfg.NONE:
        width = config.draft_logits.n if form == cfg.TOP_N else target.vocab_size
        token_ids = torch.arange(width, dtype=torch.int32).expand(num_drafts, width) if form == cfg.TOP_N else None
        logits = AnswerLogits(torch.zeros(num_drafts, width), token_ids, None)
    scheduled = []
    for _ in range(count):
        request = Request(
            request_id="largest step",
            prompt=[0],
            params=params,
            num_speculative_tokens=num_drafts,
            keys=NoiseKeys(0, 0, 0),
            stops=StopConditions(params, frozenset()),
            max_length=num_drafts + 2,
        )
        drafts = ReadyDrafts(1, 0, [0] * num_drafts, logits)
        scheduled.append(ScheduledRows(request, 0, [0] * (num_drafts + 1), drafts, samples=True))
    return scheduled
