"""The verifier's process."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from draftwire.carriers import parse_carriers
from draftwire.checkpoints import resolve_directory
from draftwire.config import parse_speculative_config, speculative_config_to_mapping
from draftwire.devices import GpuMemory, choose_device, choose_dtype, make_current
from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.metrics import serving_metrics
from draftwire.security import ClientSecurity, ServerSecurity
from draftwire.server import serve
from draftwire.v1 import generate_pb2_grpc
from draftwire.wire import MAX_REQUEST_BYTES, parse_address
from verifier_service.cache_size import choose_num_blocks
from verifier_service.engine import EngineLimits
from verifier_service.options import VerifierOptions
from verifier_service.service import SERVICE_NAME, GenerationServicer
from verifier_service.target import Target, load_target
from verifier_service.target_compile import use_compile_cache
from verifier_service.tokenizer import TextCodec

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def run(options: VerifierOptions) -> None:
    """Loads the target and serves until SIGTERM or SIGINT, then drains.

    Raises
    ------
    DraftwireError
        Says what is wrong with an option, a checkpoint or the address.
    """
    config = parse_speculative_config(options.speculative_config)
    drafters = list(dict.fromkeys(address.strip() for address in options.drafters.split(",") if address.strip()))
    security, drafter_security = _security(options)
    for address in drafters:
        parse_address(address, "drafters")
        drafter_security.credentials(address, "drafters")
    parse_address(options.listen, "listen")
    security.credentials(options.listen)
    deadline_s = _deadline(options.draft_deadline_ms)
    carriers = parse_carriers(options.carriers)
    device = choose_device(options.device)
    make_current(device)
    memory = GpuMemory(device) if device.type == "cuda" else None
    target, codec = _load(options, device)
    if device.type == "cuda":
        use_compile_cache(options.compile_cache)
        with Console(stderr=True).status("compiling the target"):
            target.compile()
    limits = EngineLimits(
        max_num_seqs=options.max_num_seqs,
        max_queue=options.max_queue,
        max_prefill_rows=options.max_prefill_rows,
        num_blocks=choose_num_blocks(target, config, options, memory),
        draft_deadline_s=deadline_s,
        adaptive_k=options.adaptive_k,
        prefix_caching=options.prefix_caching,
    )
    logger.info("%s on %s in %s; %s", options.target, target.device, target.dtype, limits)
    logger.info("speculation: %s", json.dumps(speculative_config_to_mapping(config)))
    servicer = partial(
        GenerationServicer,
        target,
        codec,
        config,
        limits,
        drafters,
        drafter_security,
        carriers=carriers,
        fuses_features=options.fuse_features,
    )
    asyncio.run(_serve(options, security, servicer))


def _security(options: VerifierOptions) -> tuple[ServerSecurity, ClientSecurity]:
    """Towards clients, and towards drafters."""
    server = ServerSecurity(
        options.tls_cert, options.tls_key, options.tls_client_ca, options.token_file, insecure=options.insecure
    )
    try:
        client = ClientSecurity(
            ca=options.drafter_tls_ca,
            certificate=options.drafter_tls_cert,
            key=options.drafter_tls_key,
            insecure=options.insecure,
        )
    except InvalidArgumentError as error:
        raise InvalidArgumentError("drafter_tls_cert", str(options.drafter_tls_cert), error.allowed) from error
    return server, client


async def _serve(
    options: VerifierOptions,
    security: ServerSecurity,
    make_servicer: Callable[[Callable[[], None]], GenerationServicer],
) -> None:
    has_failed, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_process() -> None:
        loop.call_soon_threadsafe(has_failed.set)
        loop.call_soon_threadsafe(stop.set)

    servicer = make_servicer(stop_process)
    servicer.start()
    try:
        with serving_metrics(options.metrics_listen, [servicer.collector]):
            await serve(
                options.listen,
                SERVICE_NAME,
                lambda server: generate_pb2_grpc.add_GenerationServicer_to_server(servicer, server),
                security,
                stop=stop,
                drain=partial(servicer.drain, options.drain_timeout),
                on_stop=servicer.stop,
                max_message_bytes=MAX_REQUEST_BYTES,
            )
    except ServerError:
        await servicer.stop()
        raise
    if has_failed.is_set():
        raise ServerError("the engine failed; the log says why")


def _load(options: VerifierOptions, device: torch.device) -> tuple[Target, TextCodec | None]:
    """The target and its tokenizer; a directory without one serves token ids alone."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # transformers' own bar, where nobody watches
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
