"""The verifier's process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from draftwire.carriers import check_rendezvous_dir, parse_carriers
from draftwire.checkpoints import resolve_directory
from draftwire.config import parse_speculative_config, speculative_config_to_mapping
from draftwire.devices import choose_device
from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.metrics import serving_metrics
from draftwire.security import ClientSecurity, ServerSecurity
from draftwire.server import serve
from draftwire.v1 import generate_pb2_grpc
from draftwire.wire import MAX_REQUEST_BYTES, parse_address
from verifier_service.engine import EngineLimits
from verifier_service.options import VerifierOptions
from verifier_service.ranks import Followers
from verifier_service.service import SERVICE_NAME, GenerationServicer
from verifier_service.target import check_split
from verifier_service.target_start import start_target
from verifier_service.tensor_parallel import ALONE, Rank
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
    if options.metrics_listen is not None:
        security.tls_context(options.metrics_listen, "metrics_listen")
    deadline_s = _deadline(options.draft_deadline_ms)
    carriers = parse_carriers(options.carriers)
    check_rendezvous_dir(options.rendezvous_dir)
    device = choose_device(options.device)
    async_scheduling = _schedules_ahead(options, device)
    with _start_followers(options, device) as followers:
        target, num_blocks = start_target(options, config, device, ALONE if followers is None else followers.rank)
        limits = EngineLimits(
            max_num_seqs=options.max_num_seqs,
            max_queue=options.max_queue,
            max_prefill_rows=options.max_prefill_rows,
            num_blocks=num_blocks,
            draft_deadline_s=deadline_s,
            adaptive_k=options.adaptive_k,
            prefix_caching=options.prefix_caching,
            async_scheduling=async_scheduling,
        )
        logger.info("%s on %s in %s; %s", options.target, target.device, target.dtype, limits)
        logger.info("speculation: %s", json.dumps(speculative_config_to_mapping(config)))
        servicer = partial(
            GenerationServicer,
            target,
            _tokenizer(resolve_directory(options.target)),
            config,
            limits,
            drafters,
            drafter_security,
            carriers=carriers,
            rendezvous_dir=options.rendezvous_dir,
            fuses_features=options.fuse_features,
            followers=followers,
        )
        asyncio.run(_serve(options, security, servicer, followers))


def _start_followers(options: VerifierOptions, device: torch.device) -> AbstractContextManager[Followers | None]:
    if options.tensor_parallel_size == 1:
        return nullcontext()
    check_split(resolve_directory(options.target), options.target, Rank(0, options.tensor_parallel_size))
    with Console(stderr=True).status("starting the ranks of the target"):
        return Followers(options, device)


def _schedules_ahead(options: VerifierOptions, device: torch.device) -> bool:
    """A CPU computes when it launches; and the ranks of a split target are told each step's tokens by the host."""
    is_split = options.tensor_parallel_size > 1
    if options.async_scheduling and is_split:
        raise InvalidArgumentError("async_scheduling", True, "allowed: with tensor_parallel_size = 1")
    return device.type == "cuda" and not is_split if options.async_scheduling is None else options.async_scheduling


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
    followers: Followers | None,
) -> None:
    has_failed, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_process() -> None:
        loop.call_soon_threadsafe(has_failed.set)
        loop.call_soon_threadsafe(stop.set)

    servicer = make_servicer(stop_process)
    servicer.start()
    if followers is not None:
        followers.on_loss = stop_process
    try:
        with serving_metrics(options.metrics_listen, [servicer.collector], security):
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
        raise ServerError("the engine or a rank of the target failed; the log says why")


def _tokenizer(directory: Path) -> TextCodec | None:
    """The target's; a directory without one serves token ids alone."""
    has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return TextCodec(directory) if has_tokenizer else None


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
