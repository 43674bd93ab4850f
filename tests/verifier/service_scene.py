"""Both services of a verifier with a tiny target; the engine is called directly or through a socket."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_scene import make_target
from serving import serving
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.validation import build_sampling_params, speculative_config_from_mapping
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api.model_files import ModelFiles
from verifier_service.api.preparation import DEFAULT_RULES
from verifier_service.api.requests import RequestHandler
from verifier_service.api.vllm_engine import VllmEngineServicer
from verifier_service.engine.engine import EngineLimits
from verifier_service.host.access import EngineAccess
from verifier_service.host.channel import Outbox, receive
from verifier_service.host.host import EngineHost
from verifier_service.host.in_process import InProcessEngine
from verifier_service.host.remote_engine import EngineProxy
from verifier_service.host.server import run_engine

WAIT_S = 240.0
MAX_TOKENS = 50
CONFIG = speculative_config_from_mapping({})


def make_host(*, max_num_seqs: int = 2, max_queue: int = 1, is_async: bool = False, **options: Any) -> EngineHost:
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        max_prefill_rows=64,
        num_blocks=33,
        draft_deadline_s=None,
        async_scheduling=is_async,
    )
    return EngineHost(make_target(), CONFIG, limits, [], LOOPBACK, **options)


class EngineThread:
    """A thread in place of the engine's process; `kill` shuts its socket down, as the end of a process does."""

    def __init__(self, host: EngineHost) -> None:
        self.connection, self._engine_end = socket.socketpair()
        # Small, so that a few messages fill it.
        self._engine_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._host = host
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        outbox = Outbox(self._engine_end)
        try:
            run_engine(self._host, self._engine_end, outbox)
            outbox.close()
        except EOFError:
            self._host.stop()
        self._engine_end.close()

    def kill(self) -> None:
        self._engine_end.shutdown(socket.SHUT_RDWR)

    def exit_status(self) -> int:
        return -9

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Served:
    """A verifier's services; with `process` the engine is behind a socket."""

    def __init__(
        self, host: EngineHost, process: EngineThread | None, codec: Any = None, directory: Path = Path()
    ) -> None:
        self.host = host
        self.process = process
        self.codec = codec
        self.directory = directory
        self.has_kv_events = True
        self.rules = DEFAULT_RULES
        self.has_failed = threading.Event()

    async def until_idle(self) -> None:
        scheduler = self.host.engine.scheduler
        while scheduler.running or scheduler.waiting or self.handler.open_outputs:
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        engine: EngineAccess = InProcessEngine(self.host)
        if self.process is not None:
            _, facts = receive(self.process.connection)
            engine = EngineProxy(self.process, facts)
        handler = RequestHandler(engine, self.codec, CONFIG, self.has_failed.set, self.rules)
        self.handler = handler
        servicer = VllmEngineServicer(handler, ModelFiles(self.directory), has_kv_events=self.has_kv_events)
        try:
            async with serving(handler, partial(add_VllmEngineServicer_to_server, servicer)) as address:
                self.address = address
                yield address
        finally:
            if self.process is not None:
                self.process.join()


def served(*, behind_socket: bool = True, codec: Any = None, directory: Path = Path(), **options: Any) -> Served:
    host = make_host(**options)
    return Served(host, EngineThread(host) if behind_socket else None, codec, directory)


def request(**params: Any) -> pb.GenerateRequest:
    given = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **params}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1, 4]), sampling_params=build_sampling_params(**given))


async def outputs_of(call: grpc.aio.UnaryStreamCall, pause_s: float = 0) -> list[pb.GenerateResponse]:
    """Read the rest of a call, with a pause after each message."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
        await asyncio.sleep(pause_s)
    return messages


def tokens_of(messages: Iterable[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


@asynccontextmanager
async def stub_of(scene: Served) -> AsyncIterator[GenerationStub]:
    """Serve, and yield a stub of the service `Generation`."""
    async with scene.serve() as address, grpc.aio.insecure_channel(address) as channel:
        yield GenerationStub(channel)


async def error_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """Return code and details of the status that a call ends with."""
    with pytest.raises(grpc.RpcError) as ended:
        await call
    return ended.value.code(), ended.value.details()


def play(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine within WAIT_S."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), WAIT_S))

    return run
