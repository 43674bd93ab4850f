"""The start of every rank: load the target, compile it, and size the cache."""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from draftwire.model.checkpoints import resolve_directory
from draftwire.model.devices import GpuMemory, choose_dtype, make_current
from draftwire.v1 import config_pb2
from verifier_service.host.kv_sizing import choose_num_blocks
from verifier_service.options import VerifierOptions
from verifier_service.target.compile_cache import use_compile_cache
from verifier_service.target.target import Target, load_target
from verifier_service.target.tensor_parallel import ALONE, Rank, exchange

logger = logging.getLogger(__name__)


def start_target(
    options: VerifierOptions, config: config_pb2.SpeculativeConfig, device: torch.device, rank: Rank = ALONE
) -> tuple[Target, int]:
    """Return the target on `device`, compiled on a GPU, and the number of cache blocks, which is equal on all ranks.

    Raises:
        DraftwireError: If an option or the checkpoint is wrong.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()  # of transformers
    make_current(device)
    memory = GpuMemory(device) if device.type == "cuda" else None
    console = Console(stderr=True)
    with console.status(f"loading the target {options.target}"):
        directory = resolve_directory(options.target)
        target = load_target(
            directory,
            options.target,
            choose_dtype(options.dtype, device, directory),
            device,
            max_model_len=options.max_model_len,
            dummy=options.load_format == "dummy",
            rank=rank,
        )
    if device.type == "cuda":
        use_compile_cache(options.compile_cache)
        with console.status("compiling the target"):
            target.compile()
    logger.info("sizing the cache")
    with console.status("sizing the cache: running the largest step" if memory is not None else "sizing the cache"):
        num_blocks = choose_num_blocks(target, config, options, memory)
    return target, _smallest(num_blocks, rank)


def _smallest(count: int, rank: Rank) -> int:
    """Return the smallest of all ranks' counts."""
    if rank.size == 1:
        return count
    smallest = torch.tensor([count])
    exchange(dist.all_reduce, smallest, dist.ReduceOp.MIN)
    return int(smallest)
