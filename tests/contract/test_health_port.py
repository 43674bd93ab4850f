"""The health service on a separate plain-text port of a service that requires client certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from addresses import free_address
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.contract.errors import ServerError
from draftwire.server.bootstrap import serve
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.server.security import ServerSecurity
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc

LIMITS = ReadingLimits(1 << 20, max_readers=3, max_readers_of_peer=2, max_unread=40, max_unread_of_peer=30)
SERVING = health_pb2.HealthCheckResponse.SERVING
TIMEOUT_S = 60.0


class Servicer(generate_pb2_grpc.GenerationServicer):
    async def GetVerifierInfo(self, request, context):  # noqa: N802, ARG002
        return pb.GetVerifierInfoResponse(version="here")


def mutual_tls(folder: Path) -> ServerSecurity:
    authority = Authority(folder / "authority")
    return ServerSecurity(*authority.issue("127.0.0.1"), authority.file)


@asynccontextmanager
async def served(folder: Path, health_listen: str, stop: asyncio.Event, end: asyncio.Event) -> AsyncIterator[None]:
    """Serve with mutual TLS; the drain lasts until `end` is set."""

    async def drain() -> None:
        await end.wait()

    async def on_stop() -> None:
        pass

    serving = asyncio.create_task(
        serve(
            "127.0.0.1:0",
            ["draftwire.v1.Generation"],
            lambda server: generate_pb2_grpc.add_GenerationServicer_to_server(Servicer(), server),
            mutual_tls(folder),
            MessageReader(LIMITS),
            stop=stop,
            drain=drain,
            on_stop=on_stop,
            health_listen=health_listen,
        )
    )
    try:
        yield
    finally:
        stop.set()
        end.set()
        await serving


async def health_of(channel: grpc.aio.Channel) -> int:
    """Return the status; a probe needs neither a certificate nor a token."""
    check = health_pb2_grpc.HealthStub(channel).Check
    answer = await check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    return answer.status


def test_a_probe_sees_what_clients_with_certificates_see(tmp_path):
    async def scene() -> None:
        address, stop, end = free_address(), asyncio.Event(), asyncio.Event()
        async with served(tmp_path, address, stop, end), grpc.aio.insecure_channel(address) as channel:
            assert await health_of(channel) == SERVING
            stop.set()
            while await health_of(channel) == SERVING:
                await asyncio.sleep(0.01)
            assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING

    asyncio.run(scene())


def test_the_port_for_probes_serves_nothing_else(tmp_path):
    async def scene() -> None:
        address, stop, end = free_address(), asyncio.Event(), asyncio.Event()
        async with served(tmp_path, address, stop, end), grpc.aio.insecure_channel(address) as channel:
            await health_of(channel)
            for path in ("/draftwire.v1.Generation/GetVerifierInfo", "/nothing"):
                with pytest.raises(grpc.RpcError) as refused:
                    await channel.unary_unary(path)(b"", timeout=TIMEOUT_S)
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError) as refused:
                await check(bytes(5000), timeout=TIMEOUT_S)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await health_of(channel) == SERVING

    asyncio.run(scene())


def test_a_port_that_cannot_be_bound_is_named(tmp_path):
    async def scene() -> None:
        stop, end = asyncio.Event(), asyncio.Event()
        async with served(tmp_path, "192.0.2.1:1", stop, end):
            pass

    with pytest.raises(ServerError, match=r"health_listen = '192.0.2.1:1': cannot be bound"):
        asyncio.run(scene())
