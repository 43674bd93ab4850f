"""The drafter's process."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.progress import track

from drafter_service.choices import choose_limits
from drafter_service.engine.engine import DraftEngine
from drafter_service.heads import load_head
from drafter_service.limits import EngineLimits
from drafter_service.options import DrafterOptions
from drafter_service.server.engine_thread import EngineThread
from drafter_service.server.service import SERVICE_NAME, DraftingService
from draftwire.contract.errors import ServerError
from draftwire.model.checkpoints import resolve_directory
from draftwire.model.devices import GpuMemory, choose_device, choose_dtype, make_current
from draftwire.server.bootstrap import serve
from draftwire.server.memory import keep_what_is_loaded
from draftwire.server.metrics import serving_metrics
from draftwire.server.ports import check_ports
from draftwire.server.security import ServerSecurity
from draftwire.transport import check_rendezvous_dir, parse_carriers
from draftwire.v1 import draft_pb2_grpc

logger = logging.getLogger(__name__)


def run(options: DrafterOptions) -> None:
    """Load the head and serve drafts until SIGTERM or SIGINT, then drain.

    Raises:
        DraftwireError: If an option, a checkpoint or the address is invalid.
    """
    security = ServerSecurity(options.tls_cert, options.tls_key, options.tls_client_ca, insecure=options.insecure)
    security.credentials(options.listen)
    if options.metrics_listen is not None:
        security.tls_context(options.metrics_listen, "metrics_listen")
    check_ports(listen=options.listen, metrics_listen=options.metrics_listen, health_listen=options.health_listen)
    parse_carriers(options.carriers)
    check_rendezvous_dir(options.rendezvous_dir)
    EngineLimits.from_options(options)  # refuses limits out of range before anything is loaded
    device = choose_device(options.device)
    make_current(device)
    engine, dtype = _load_engine(options, device)
    asyncio.run(_serve(options, security, engine, dtype))


def _load_engine(options: DrafterOptions, device: torch.device) -> tuple[DraftEngine, torch.dtype]:
    console = Console(stderr=True)
    with console.status("finding the checkpoints") as status:
        head_dir = resolve_directory(options.head)
        target_dir = resolve_directory(options.target)
        dtype = choose_dtype(options.dtype, device, target_dir)
        status.update(f"loading the head {options.head}")
        memory = GpuMemory(device) if device.type == "cuda" else None
        head = load_head(
            *(head_dir, target_dir, dtype, device),
            dummy=options.load_format == "dummy",
            quantization=options.quantization,
        )
        status.update("sizing the cache")
        limits = choose_limits(options, head, dtype, device, target_dir, memory)
        status.update(f"allocating a cache of {limits.kv_cache_tokens} tokens")
        engine = DraftEngine(head, limits, dtype, device)
    engine.warm_up(partial(track, description="capturing CUDA graphs", console=console))
    keep_what_is_loaded()
    logger.info("%s head %s on %s in %s; %s", head.spec.method, options.head, device, dtype, limits)
    return engine, dtype


def head_name(name: str) -> str:
    """Return the name of a head: its directory's name, or its hub id."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


async def _serve(options: DrafterOptions, security: ServerSecurity, engine: DraftEngine, dtype: torch.dtype) -> None:
    failed, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_process() -> None:
        loop.call_soon_threadsafe(failed.set)
        loop.call_soon_threadsafe(stop.set)

    thread = EngineThread(engine, stop_process)
    carriers = parse_carriers(options.carriers)
    service = DraftingService(thread, head_name(options.head), dtype, carriers, options.rendezvous_dir)

    def register(server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftingServicer_to_server(service, server)

    async def stop_engine() -> None:
        await asyncio.to_thread(thread.stop)

    thread.start()
    with serving_metrics(options.metrics_listen, [service.collector], security):
        await serve(
            options.listen,
            [SERVICE_NAME],
            register,
            security,
            service.reader,
            stop=stop,
            drain=partial(service.drain, options.drain_timeout),
            on_stop=stop_engine,
            interceptors=[service.interceptor],
            health_listen=options.health_listen,
        )
    if failed.is_set():
        raise ServerError("the draft engine failed; the log says why")
