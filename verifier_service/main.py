"""The verifier's process; with a separate engine process, the client process."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from draftwire.contract.addresses import MAX_REQUEST_BYTES
from draftwire.contract.errors import ServerError
from draftwire.model.checkpoints import resolve_directory
from draftwire.server.bootstrap import serve
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.v1 import generate_pb2_grpc
from verifier_service.api.model_files import ModelFiles
from verifier_service.api.preparation import RequestRules
from verifier_service.api.requests import RequestHandler
from verifier_service.api.sampling_defaults import read_sampling_defaults
from verifier_service.api.service import SERVICE_NAME, GenerationServicer
from verifier_service.api.vllm_engine import SERVICE_NAME as VLLM_SERVICE_NAME
from verifier_service.api.vllm_engine import VllmEngineServicer
from verifier_service.core.tokenizer import find_tokenizer, warn_of_ids_beyond
from verifier_service.host.access import EngineAccess
from verifier_service.host.in_process import InProcessEngine
from verifier_service.host.process import EngineProcess
from verifier_service.host.remote_engine import EngineProxy
from verifier_service.options import VerifierOptions
from verifier_service.settings import Settings, check_options

# Least limit of calls whose message has not arrived; one connection may have half of them.
MAX_UNREAD = 1024


def run(options: VerifierOptions, engine_process: EngineProcess | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Without an engine process the engine runs in this process.

    Raises:
        DraftwireError: If an option, a checkpoint or the address is invalid.
    """
    settings = check_options(options)
    if engine_process is not None:
        # Wait first, for its errors: a missing checkpoint would be reported as one without a tokenizer.
        facts = engine_process.wait_until_ready()
        asyncio.run(_serve(options, settings, EngineProxy(engine_process, facts)))
        return
    # Only the process with the target loads the target's libraries.
    from verifier_service.host.start import hosting_engine

    with hosting_engine(options, settings) as host:
        asyncio.run(_serve(options, settings, InProcessEngine(host)))


def reading_limits(max_open: int) -> ReadingLimits:
    """Return the limits of unread messages of a verifier with at most `max_open` requests."""
    max_unread = max(MAX_UNREAD, max_open)  # no refusals of a burst that fits into the queue
    return ReadingLimits(MAX_REQUEST_BYTES, 16, 4, max_unread, max_unread // 2)


async def _serve(options: VerifierOptions, settings: Settings, engine: EngineAccess) -> None:
    directory = resolve_directory(options.target)
    codec = find_tokenizer(directory)
    if codec is not None:
        warn_of_ids_beyond(codec, engine.facts.vocab_size)
    rules = RequestRules(
        takes_priorities=options.scheduling_policy == "priority",
        default_sampling_params=read_sampling_defaults(options.generation_config, directory),
    )
    has_failed, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_process() -> None:
        loop.call_soon_threadsafe(has_failed.set)
        loop.call_soon_threadsafe(stop.set)

    handler = RequestHandler(engine, codec, settings.config, stop_process, rules)

    def register(server: grpc.aio.Server) -> None:
        generate_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(handler), server)
        servicer = VllmEngineServicer(handler, ModelFiles(directory.resolve()), has_kv_events=options.kv_events)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)

    await handler.start()
    try:
        await serve(
            options.listen,
            (SERVICE_NAME, VLLM_SERVICE_NAME),
            register,
            settings.security,
            MessageReader(reading_limits(engine.facts.max_open), engine.count_refused),
            stop=stop,
            drain=partial(handler.drain, options.drain_timeout),
            on_stop=handler.stop,
            health_listen=options.health_listen,
        )
    except ServerError:
        await handler.stop()
        raise
    if has_failed.is_set():
        raise ServerError("the engine or a rank of the target failed; the log says why")
