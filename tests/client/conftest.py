"""A Generation service that answers from a script, served in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

STATISTICS = pb.RequestStatistics(
    prompt_tokens=3,
    output_tokens=4,
    verify_steps=2,
    verify_tokens=4,
    drafted=[2, 2],
    accepted=[2, 0],
    time_to_first_token_s=0.25,
    total_time_s=0.5,
)
SCRIPT = [
    pb.GenerateResponse(
        token_ids=[5, 6, 7], text="é b ", drafted=[False, True, False], token_text_ends=[1, 3, 4], request_id="r-1"
    ),
    pb.GenerateResponse(
        token_ids=[8],
        text="end",
        drafted=[True],
        token_text_ends=[3],
        finish_reason=pb.FINISH_REASON_STOP,
        stop_token_id=8,
        statistics=STATISTICS,
    ),
]


@dataclass
class FakeVerifier(GenerationServicer):
    """A verifier that sends the responses of `script`, then aborts with `failure` if that is set.

    With `endless` it omits the last response and waits for the client to leave. A request without drafts gets
    `script_without_drafts`, if that is set.
    """

    script: list[pb.GenerateResponse] = field(default_factory=lambda: list(SCRIPT))
    script_without_drafts: list[pb.GenerateResponse] | None = None
    failure: tuple[grpc.StatusCode, str] | None = None
    failure_metadata: tuple[tuple[str, str | bytes], ...] = ()
    endless: bool = False
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    health: HealthServicer = field(default_factory=HealthServicer)
    server: grpc.Server | None = None

    def stop(self) -> None:
        """End the server and all of its calls; may be called again."""
        self.left.set()
        if self.server is not None:
            self.server.stop(0).wait()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        context.add_callback(self.left.set)
        without = request.HasField("num_speculative_tokens") and request.num_speculative_tokens == 0
        script = self.script_without_drafts if without and self.script_without_drafts else self.script
        yield from script[:-1] if self.endless else script
        if self.failure is not None:
            context.set_trailing_metadata(self.failure_metadata)
            context.abort(*self.failure)
        if self.endless:
            self.left.wait(120)

    def GetVerifierInfo(  # noqa: N802
        self,
        request: pb.GetVerifierInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetVerifierInfoResponse:
        return pb.GetVerifierInfoResponse(version="1.2.3", target="demo", vocab_size=99)


@pytest.fixture
def start_verifier() -> Iterator[Callable[..., FakeVerifier]]:
    """A function that starts a fake verifier with a health service that reports SERVING."""
    fakes: list[FakeVerifier] = []

    def start(listen: str = "127.0.0.1:0") -> FakeVerifier:
        fake = FakeVerifier()
        fake.server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_GenerationServicer_to_server(fake, fake.server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.health, fake.server)
        host, _, _ = listen.rpartition(":")
        fake.address = f"{host}:{fake.server.add_insecure_port(listen)}"
        fake.server.start()
        fakes.append(fake)
        return fake

    yield start
    for fake in fakes:
        fake.stop()


@pytest.fixture
def verifier(start_verifier: Callable[..., FakeVerifier]) -> FakeVerifier:
    return start_verifier()
