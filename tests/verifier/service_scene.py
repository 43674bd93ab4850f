"""Both services of a verifier over a tiny target, with the engine in this process or behind a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from engine_scene import make_target
from serving import serving
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.validation import build_sampling_params, speculative_config_from_mapping
from draftwire.v1 import generate_pb2 as pb
from verifier_service.api.model_files import ModelFiles
from verifier_service.api.preparation import DEFAULT_RULES
from verifier_service.api.requests import RequestHandler
from verifier_service.api.vllm_engine import VllmEngineServicer
from verifier_service.engine.engine import EngineLimits
from verifier_service.host.access import EngineAccess, InProcessEngine
from verifier_service.host.channel import Outbox, receive
from verifier_service.host.host import EngineHost
from verifier_service.host.remote_engine import EngineProxy
from verifier_service.host.server import run_engine

WAIT_S = 240.0
MAX_TOKENS = 50
CONFIG = speculative_config_from_mapping({})


def make_host(*, is_async: bool = False) -> EngineHost:
    sizes = {"max_num_seqs": 2, "max_queue": 1, "max_prefill_rows": 64, "num_blocks": 33}
    limits = EngineLimits(**sizes, draft_deadline_s=None, async_scheduling=is_async)
    return EngineHost(make_target(), CONFIG, limits, [], LOOPBACK)


class EngineThread:
    """In place of an engine's process; `kill` does what the end of one does to its socket."""

    def __init__(self, host: EngineHost) -> None:
        self.connection, self._engine_end = socket.socketpair()
        # Full after some messages.
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
    """A service whose engine is behind a socket, or not."""

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


def served(
    *, behind_socket: bool = True, is_async: bool = False, codec: Any = None, directory: Path = Path()
) -> Served:
    host = make_host(is_async=is_async)
    return Served(host, EngineThread(host) if behind_socket else None, codec, directory)


def request(**params: Any) -> pb.GenerateRequest:
    given = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **params}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1, 4]), sampling_params=build_sampling_params(**given))


async def outputs_of(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages
