"""The verifier's process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from draftwire.checkpoints import resolve_directory
from draftwire.config import parse_speculative_config, speculative_config_to_mapping
from draftwire.devices import choose_device, choose_dtype, free_memory, make_current
from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.server import serve
from draftwire.v1 import config_pb2, generate_pb2_grpc
from draftwire.wire import parse_address
from verifier_service.engine import EngineLimits
from verifier_service.options import VerifierOptions
from verifier_service.service import SERVICE_NAME, GenerationServicer
from verifier_service.target import Target, load_target
from verifier_service.tokenizer import TextCodec

logger = logging.getLogger(__name__)

CPU_KV_CACHE_TOKENS = 65536
# The rest is for activations and whoever shares the device.
CUDA_KV_CACHE_SHARE = 0.8
# Width of the features kept beside the cache, in hidden sizes: EAGLE-3 takes three states.
FEATURE_STATES = 3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def run(options: VerifierOptions) -> None:
    """Loads the target and serves until SIGTERM or SIGINT.

    Raises
    ------
    DraftwireError
        Says what is wrong with an option, a checkpoint or the address.
    """
    config = parse_speculative_config(options.speculative_config)
    drafters = list(dict.fromkeys(address.strip() for address in options.drafters.split(",") if address.strip()))
    for address in drafters:
        parse_address(address, "drafters")
    parse_address(options.listen, "listen")
    deadline_s = _deadline(options.draft_deadline_ms)
    target, codec = _load(options)
    limits = EngineLimits(
        max_num_seqs=options.max_num_seqs,
        max_queue=options.max_queue,
        max_prefill_rows=options.max_prefill_rows,
        num_blocks=_num_blocks(target, options.kv_cache_tokens, options.max_num_seqs),
        draft_deadline_s=deadline_s,
    )
    logger.info("%s on %s in %s; %s", options.target, target.device, target.dtype, limits)
    logger.info("speculation: %s", json.dumps(speculative_config_to_mapping(config)))
    asyncio.run(_serve(options.listen, target, codec, config, limits, drafters))


async def _serve(
    listen: str,
    target: Target,
    codec: TextCodec | None,
    config: config_pb2.SpeculativeConfig,
    limits: EngineLimits,
    drafters: list[str],
) -> None:
    has_failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_process() -> None:
        loop.call_soon_threadsafe(has_failed.set)
        os.kill(os.getpid(), signal.SIGTERM)

    servicer = GenerationServicer(target, codec, config, limits, drafters, stop_process)
    servicer.start()
    try:
        await serve(
            listen,
            SERVICE_NAME,
            lambda server: generate_pb2_grpc.add_GenerationServicer_to_server(servicer, server),
            servicer.stop,
        )
    except ServerError:
        await servicer.stop()
        raise
    if has_failed.is_set():
        raise ServerError("the engine failed; the log says why")


def _load(options: VerifierOptions) -> tuple[Target, TextCodec | None]:
    """The target and its tokenizer; a directory without one serves token ids alone."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # transformers' own bar, where nobody watches
    device = choose_device(options.device)
    make_current(device)
    with Console(stderr=True).status(f"loading the target {options.target}"):
        directory = resolve_directory(options.target)
        target = load_target(
            directory,
            options.target,
            choose_dtype(options.dtype, device, directory),
            device,
            max_model_len=options.max_model_len,
            dummy=options.load_format == "dummy",
        )
        has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
        return target, TextCodec(directory) if has_tokenizer else None


def _deadline(text: str) -> float | None:
    """Seconds, or None for off."""
    if text == "off":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < float("inf"):
        raise InvalidArgumentError("draft_deadline_ms", text, 'allowed: "off" or milliseconds in [0, inf)')
    return milliseconds / 1000


def _num_blocks(target: Target, tokens: int | None, max_num_seqs: int) -> int:
    """Blocks of the cache, the padding block included.

    Raises
    ------
    InvalidArgumentError
        When not even one sequence of full length fits.
    """
    longest = target.max_model_len
    most = max_num_seqs * blocks_for(longest)
    if tokens is not None:
        blocks = blocks_for(tokens)
    elif target.device.type == "cpu":
        blocks = min(most, max(blocks_for(CPU_KV_CACHE_TOKENS), blocks_for(longest)))
    else:
        row = sum(heads * (key + value) for heads, key, value in target.layer_shapes)
        row += FEATURE_STATES * target.hidden_size
        free = free_memory(target.device) * CUDA_KV_CACHE_SHARE
        blocks = min(most, int(free / (row * target.dtype.itemsize * BLOCK_SIZE)))
    if blocks < blocks_for(longest):
        raise InvalidArgumentError(
            "kv_cache_tokens", blocks * BLOCK_SIZE, f"must hold one request of max_model_len = {longest} positions"
        )
    return blocks + 1
