"""A drafter served in this process, and verifiers' streams to the drafter."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import torch
from harness import Rows
from tiny_head import TARGET_VOCAB, WIDTH, TinyHead

from drafter_service.engine.engine import DraftEngine
from drafter_service.limits import EngineLimits
from drafter_service.server.engine_thread import EngineThread
from drafter_service.server.metrics import DrafterCollector
from drafter_service.server.service import DraftingService
from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.tensors import encode_tensor
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1.draft_pb2_grpc import DraftingStub, add_DraftingServicer_to_server
from draftwire_kernels import NOISE_VERSION

TIMEOUT_S = 120
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LIMITS = EngineLimits(
    max_num_seqs=8,
    max_model_len=96,
    kv_cache_tokens=2048,
    max_num_speculative_tokens=6,
    max_batch_rows=256,
    max_sessions=3,
)


def set_field(message: Any, path: Sequence[str], value: Any) -> None:
    """Set the field of a message at `path`, a list of field names."""
    *parents, name = path
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def hello(config: dict[str, Any] | None = None, **changes: Any) -> pb.VerifierHello:
    """Return a hello that fits the tiny head, except for `changes`: values by path, such as target__vocab_size."""
    message = pb.VerifierHello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        verifier="test",
        target=pb.TargetSpec(name="target", vocab_size=TARGET_VOCAB, hidden_size=8, num_layers=9, max_model_len=96),
        features=pb.FeatureSpec(layers=[2, 4, 6], width=WIDTH, dtype=pb.DTYPE_FLOAT32),
        speculative_config=config_pb2.SpeculativeConfig(**(config or {})),
        max_sequences=8,
        carriers=[pb.CARRIER_BYTES],
    )
    for path, value in changes.items():
        set_field(message, path.split("__"), value)
    return message


def step_message(step_id: int, rows: list[Rows] | None = None, new: list[int] | None = None) -> pb.DraftStep:
    """Return a well-formed step; `new` sequences have temperature 1, key 7 and begin at row 0."""
    rows, new = rows or [], new or []
    step = pb.DraftStep(
        step_id=step_id,
        sequence_ids=[part.sequence_id for part in rows],
        first_rows=[part.first for part in rows],
        num_rows=[part.count for part in rows],
        num_drafts=[part.drafts for part in rows],
    )
    if new:
        step.opened.CopyFrom(
            pb.OpenSequences(
                ids=new, temperatures=[1.0] * len(new), proposal_keys=[7] * len(new), first_rows=[0] * len(new)
            )
        )
    if rows:
        pieces = [part.text.rows(part.first, part.count) for part in rows]
        step.tokens.CopyFrom(encode_tensor(torch.cat([piece[0] for piece in pieces])))
        step.features.CopyFrom(encode_tensor(torch.cat([piece[1] for piece in pieces])))
    return step


class VerifierStream:
    """One stream of a verifier; the test writes and reads the messages."""

    def __init__(self, stub: DraftingStub) -> None:
        self._requests: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
        self.call: Any = stub.Draft(iter(self._requests.get, None), timeout=TIMEOUT_S)

    def send(self, message: pb.VerifierHello | pb.DraftStep | pb.KeepAlive) -> None:
        if isinstance(message, pb.VerifierHello):
            self._requests.put(pb.DraftRequest(hello=message))
        elif isinstance(message, pb.KeepAlive):
            self._requests.put(pb.DraftRequest(keep_alive=message))
        else:
            self._requests.put(pb.DraftRequest(step=message))

    def send_request(self, request: pb.DraftRequest) -> None:
        """Send a request of any kind."""
        self._requests.put(request)

    def read(self) -> pb.DraftResponse:
        response: pb.DraftResponse = next(self.call)
        return response

    def ask(self, message: pb.VerifierHello | pb.DraftStep) -> pb.DraftResponse:
        self.send(message)
        return self.read()

    def end(self) -> None:
        """End the requests."""
        self._requests.put(None)

    def error(self) -> tuple[grpc.StatusCode, str]:
        """Return the status and text that ended the stream."""
        try:
            while True:
                self.read()
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        except StopIteration:
            return grpc.StatusCode.OK, ""


class ServedDrafter:
    """A served drafter: its address, engine, metrics and streams."""

    def __init__(self, engine: EngineThread, service: DraftingService, port: int, loop: Any) -> None:
        self.engine = engine
        self._service = service
        self._loop = loop
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = DraftingStub(self.channel)

    @property
    def collector(self) -> DrafterCollector:
        """Return the drafter's metrics."""
        return self._service.collector

    def drain(self, timeout_s: float) -> Future[None]:
        """Drain the drafter, as SIGTERM does; the future is done when the drain has ended."""
        return asyncio.run_coroutine_threadsafe(self._service.drain(timeout_s), self._loop)

    def stream(self) -> VerifierStream:
        return VerifierStream(self.stub)

    def connect(self, config: dict[str, Any] | None = None) -> VerifierStream:
        """Return a stream after the handshake."""
        stream = self.stream()
        stream.ask(hello(config))
        return stream

    def refusal(self, message: pb.VerifierHello | pb.DraftStep) -> tuple[grpc.StatusCode, str]:
        """Return the status and text that end a stream with this first message."""
        stream = self.stream()
        stream.send(message)
        return stream.error()


@contextlib.contextmanager
def serve_drafter(head: TinyHead, limits: EngineLimits = LIMITS) -> Iterator[ServedDrafter]:
    """Serve `head` on a free port until the end of the context."""
    engine = EngineThread(DraftEngine(head, limits, torch.float32, torch.device("cpu")), lambda: None)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, DraftingService, int]:
        service = DraftingService(engine, "tiny/head", torch.float32)
        server = grpc.aio.server(interceptors=[service.interceptor], options=CHANNEL_OPTIONS)
        add_DraftingServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, service, port

    engine.start()
    server, service, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    served = ServedDrafter(engine, service, port, loop)
    yield served
    served.channel.close()
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
    engine.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
