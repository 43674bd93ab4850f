"""Messages are counted where gRPC encodes and decodes them, with equal counts at both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwire.server.call_admission import AdmissionInterceptor
from draftwire.server.counting import CountingChannel, CountingInterceptor
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc

Counted = list[tuple[str, str, int]]  # direction, message, bytes

INFO = pb.GetDrafterInfoResponse(head="head")
CHUNKS = [pb.FeatureFusionChunk(data=bytes(size)) for size in (7, 5)]


class Drafter(draft_pb2_grpc.DraftingServicer):
    async def GetDrafterInfo(self, request: Any, context: Any) -> pb.GetDrafterInfoResponse:  # noqa: ARG002, N802
        return INFO

    async def GetFeatureFusion(  # noqa: N802
        self, request: Any, context: Any  # noqa: ARG002
    ) -> AsyncIterator[pb.FeatureFusionChunk]:
        for chunk in CHUNKS:
            yield chunk

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DraftResponse]:  # noqa: ARG002, N802
        async for request in request_iterator:
            yield pb.DraftResponse(drafts=pb.Drafts(step_id=request.step.step_id))


def count_calls(call: Any) -> tuple[Counted, Counted]:
    """Return what a verifier and a drafter count while `call` uses a stub and its channel."""
    counted: tuple[Counted, Counted] = ([], [])

    def counting(end: Counted) -> Any:
        def count(direction: str, message: Message, num_bytes: int) -> None:
            end.append((direction, message.DESCRIPTOR.name, num_bytes))

        return count

    async def run() -> None:
        name, reader = "draftwire.v1.Drafting", MessageReader(ReadingLimits(1 << 20, 1, 1, 1, 1))
        interceptors = [AdmissionInterceptor([name], reader, reader), CountingInterceptor(name, counting(counted[1]))]
        server = grpc.aio.server(interceptors=interceptors)
        draft_pb2_grpc.add_DraftingServicer_to_server(Drafter(), server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub_channel: Any = CountingChannel(channel, counting(counted[0]))
            await asyncio.wait_for(call(draft_pb2_grpc.DraftingStub(stub_channel), channel), 10)
        await server.stop(None)

    asyncio.run(run())
    return counted


def test_both_ends_count_every_message_of_a_call_with_its_bytes():
    requests = [pb.DraftRequest(step=pb.DraftStep(step_id=step_id)) for step_id in (1, 1000)]
    answers = [pb.DraftResponse(drafts=pb.Drafts(step_id=step_id)) for step_id in (1, 1000)]
    asked = pb.GetFeatureFusionRequest(head_fingerprint="f00d")

    async def call(stub: Any, _channel: Any) -> None:
        await stub.GetDrafterInfo(pb.GetDrafterInfoRequest())
        assert [chunk async for chunk in stub.GetFeatureFusion(asked)] == CHUNKS
        assert [answer async for answer in stub.Draft(iter(requests))] == answers

    verifier, drafter = count_calls(call)
    sent = [pb.GetDrafterInfoRequest(), asked, *requests]
    received = [INFO, *CHUNKS, *answers]
    expected = [
        (direction, message.DESCRIPTOR.name, len(message.SerializeToString()))
        for direction, messages in (("sent", sent), ("received", received))
        for message in messages
    ]
    assert sorted(verifier) == sorted(expected)
    turned = {"sent": "received", "received": "sent"}
    assert sorted(drafter) == sorted((turned[direction], *rest) for direction, *rest in expected)


def test_a_request_that_cannot_be_decoded_is_not_counted():
    async def call(_stub: Any, channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await channel.unary_unary("/draftwire.v1.Drafting/GetDrafterInfo")(b"\xff\xff\xff\xff")

    assert count_calls(call) == ([], [])


def test_other_services_of_the_server_are_not_counted():
    async def call(_stub: Any, channel: grpc.aio.Channel) -> None:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    assert count_calls(call) == ([], [])
