"""The command `draftwire verifier`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click
from rich.console import Console

from draftwire.checkpoints import resolve_directory
from draftwire.config import parse_speculative_config, resolve_speculative_config
from draftwire.devices import free_memory, resolve_device, resolve_dtype
from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.server import serve
from draftwire.v1 import config_pb2, generate_pb2_grpc
from draftwire.wire import parse_address
from verifier_service.engine import EngineLimits
from verifier_service.service import SERVICE_NAME, GenerationServicer
from verifier_service.target import Target, load_target
from verifier_service.tokenizer import TextCodec

# Share of the free memory of a GPU that the cache takes by default.
CACHE_SHARE = 0.8
# Rows of cache on a CPU by default.
CPU_CACHE_ROWS = 65536
# Width of the features kept beside the cache, in hidden sizes: EAGLE-3 takes three states.
FEATURE_STATES = 3


@click.command()
@click.option("--target", required=True, help="Directory or hub id of the target model.")
@click.option("--drafters", default="", metavar="HOST:PORT,...", help="Drafters to use; none serves without drafts.")
@click.option("--listen", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="Own address.")
@click.option("--speculative-config", "speculative", default="{}", metavar="JSON", help="JSON, or a file with it.")
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="cpu, cuda, cuda:N or auto.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16 or auto.")
@click.option("--max-num-seqs", default=64, show_default=True, type=click.IntRange(1, 4096), help="Requests at once.")
@click.option("--max-queue", default=1024, show_default=True, type=click.IntRange(0), help="Requests that may wait.")
@click.option("--max-model-len", default=None, type=click.IntRange(2), help="Positions served [default: the target's].")
@click.option("--max-prefill-rows", default=512, show_default=True, type=click.IntRange(1), help="Prompt rows a step.")
@click.option("--kv-cache-tokens", default=None, type=click.IntRange(1), help="Cache size [default: from memory].")
@click.option(
    "--draft-deadline-ms",
    default="500",
    show_default=True,
    metavar="MS|off",
    help="How long a step waits for drafts; off waits until the drafter answers or is lost.",
)
@click.option(
    "--load-format",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "dummy"]),
    help="dummy: random weights from config.json alone, to measure a size.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severe messages shown.",
)
def verifier(
    target: str,
    drafters: str,
    listen: str,
    speculative: str,
    device: str,
    dtype: str,
    max_num_seqs: int,
    max_queue: int,
    max_model_len: int | None,
    max_prefill_rows: int,
    kv_cache_tokens: int | None,
    draft_deadline_ms: str,
    load_format: str,
    log_level: str,
) -> None:
    """Serve generation from a target model, verifying the drafts of drafters."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = parse_speculative_config(speculative)
    addresses = [address.strip() for address in drafters.split(",") if address.strip()]
    for address in addresses:
        parse_address(address, "drafters")
    parse_address(listen, "listen")
    deadline = _deadline(draft_deadline_ms)
    where = resolve_device(device)
    with Console(stderr=True).status(f"loading {target}"):
        directory = resolve_directory(target)
        is_dummy = load_format == "dummy"
        kind = resolve_dtype(dtype, directory, where)
        model = load_target(directory, target, kind, where, max_model_len=max_model_len, dummy=is_dummy)
        codec = _codec(directory, is_dummy)
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        max_prefill_rows=max_prefill_rows,
        num_blocks=_num_blocks(model, kv_cache_tokens, max_num_seqs),
        draft_deadline_s=deadline,
    )
    asyncio.run(_serve(listen, model, codec, config, limits, addresses))


async def _serve(
    listen: str,
    target: Target,
    codec: TextCodec | None,
    config: config_pb2.SpeculativeConfig,
    limits: EngineLimits,
    addresses: list[str],
) -> None:
    servicer = GenerationServicer(target, codec, resolve_speculative_config(config), limits, addresses)
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


def _deadline(text: str) -> float | None:
    """Seconds, or None for off."""
    if text == "off":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < float("inf"):
        raise InvalidArgumentError("draft-deadline-ms", text, 'allowed: "off" or milliseconds in [0, inf)')
    return milliseconds / 1000


def _codec(directory: Path, is_dummy: bool) -> TextCodec | None:
    """The tokenizer; a dummy model may go without one."""
    if is_dummy and not (directory / "tokenizer.json").is_file():
        return None
    return TextCodec(directory)


def _num_blocks(target: Target, tokens: int | None, max_num_seqs: int) -> int:
    """Blocks of the cache, the padding block included.

    Raises
    ------
    InvalidArgumentError
        When not even one sequence of full length fits.
    """
    most = max_num_seqs * blocks_for(target.max_model_len)
    if tokens is not None:
        blocks = blocks_for(tokens)
    elif target.device.type == "cpu":
        blocks = min(most, blocks_for(CPU_CACHE_ROWS))
    else:
        per_row = sum(heads * (k + v) for heads, k, v in target.layer_shapes) + FEATURE_STATES * target.hidden_size
        free = free_memory(target.device) * CACHE_SHARE
        blocks = min(most, int(free / (per_row * target.dtype.itemsize * BLOCK_SIZE)))
    if blocks < blocks_for(target.max_model_len):
        raise InvalidArgumentError(
            "kv-cache-tokens", blocks * BLOCK_SIZE, f"must hold one sequence of max-model-len = {target.max_model_len}"
        )
    return blocks + 1
