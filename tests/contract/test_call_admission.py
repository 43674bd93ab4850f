"""Calls whose message does not arrive: when they end, how many are read at once, and which are refused unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from half_sent import HalfSender

from draftwire.contract.retry import retry_after_s
from draftwire.server import message_reading
from draftwire.server.bootstrap import serve
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.server.security import ServerSecurity
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc

GENERATE, INFO = "/draftwire.v1.Generation/Generate", "/draftwire.v1.Generation/GetVerifierInfo"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MESSAGE_BYTES = 1 << 20
WINDOW_BYTES = 65536
LIMITS = ReadingLimits(MESSAGE_BYTES, max_readers=3, max_readers_of_peer=2, max_unread=40, max_unread_of_peer=30)
TIMEOUT_S = 100.0


class Servicer(generate_pb2_grpc.GenerationServicer):
    async def GetVerifierInfo(self, request, context):  # noqa: N802, ARG002
        return pb.GetVerifierInfoResponse(version="here")

    async def Generate(self, request, context):  # noqa: N802
        await context.write(pb.GenerateResponse(text=request.text, finish_reason=pb.FINISH_REASON_LENGTH))


class Served:
    """A server with small limits.

    Attributes
    ----------
    address
        HOST:PORT of the server.
    num_refused
        Calls that were counted as refused.
    """

    def __init__(self) -> None:
        self.address = ""
        self.num_refused = 0

    def count_refused(self) -> None:
        self.num_refused += 1

    async def generate(self, channel: grpc.aio.Channel, text: str = "text") -> str:
        """Return the text that the server sends back."""
        call = generate_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text=text), timeout=TIMEOUT_S)
        return "".join([response.text async for response in call])


@asynccontextmanager
async def served(
    capsys: pytest.CaptureFixture[str], limits: ReadingLimits = LIMITS, token_file: Path | None = None
) -> AsyncIterator[Served]:
    made, stop = Served(), asyncio.Event()

    async def nothing() -> None:
        pass

    serving = asyncio.create_task(
        serve(
            "127.0.0.1:0",
            ["draftwire.v1.Generation"],
            lambda server: generate_pb2_grpc.add_GenerationServicer_to_server(Servicer(), server),
            ServerSecurity(token_file=token_file),
            MessageReader(limits, made.count_refused),
            stop=stop,
            drain=nothing,
            on_stop=nothing,
        )
    )
    try:
        text = ""
        while "listening on" not in text:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
            text += capsys.readouterr().out
        made.address = text.rpartition(" ")[2].strip()
        yield made
    finally:
        stop.set()
        await serving


@pytest.fixture
def play(capsys: pytest.CaptureFixture[str]):
    """A function that runs a scene against a server."""

    def run(scene: Callable[[Served], Awaitable[None]], **options: Any) -> None:
        async def play_scene() -> None:
            async with served(capsys, **options) as server:
                await asyncio.wait_for(scene(server), 2 * TIMEOUT_S)

        asyncio.run(play_scene())

    return run


async def refusal(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("path", [GENERATE, INFO, HEALTH, REFLECTION])
@pytest.mark.parametrize("half", [False, True], ids=["none", "half"])
def test_a_message_that_does_not_come_ends_its_call(play, monkeypatch, path, half):
    monkeypatch.setattr(message_reading, "MESSAGE_S", 0.5)

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as client:
            call = await client.begin(path)
            if half:
                await client.send(call, 1000, short=10)
            await client.wait_for_ends(1, TIMEOUT_S)
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await server.generate(channel) == "text"

    play(scene)


def test_the_text_says_that_the_message_did_not_come(play, monkeypatch):
    monkeypatch.setattr(message_reading, "MESSAGE_S", 0.2)

    async def scene(server: Served) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            error = await refusal(channel.stream_stream(GENERATE)(timeout=TIMEOUT_S).read())
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "the message did not arrive within 0.2 s" in error.details()

    play(scene)


@pytest.mark.parametrize(("path", "num_readers"), [(GENERATE, 3), (HEALTH, 1)])
def test_few_large_messages_are_taken_in_at_once(play, monkeypatch, path, num_readers):
    """gRPC lets a call send its whole message as soon as the server reads it, so readers cost memory."""
    monkeypatch.setattr(message_reading, "CONTENDED_S", TIMEOUT_S)

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as first, HalfSender(server.address) as second:
            clients = [first, second]
            for client in clients:
                for call in await client.begin_many(10, path):
                    asyncio.create_task(client.send(call, MESSAGE_BYTES, short=10))  # noqa: RUF006
            sent = -1
            while sent != (sent := sum(client.num_sent for client in clients)):
                await asyncio.sleep(0.7)
            assert sent <= num_readers * MESSAGE_BYTES + 20 * WINDOW_BYTES
            assert max(client.num_sent for client in clients) <= min(num_readers, 2) * MESSAGE_BYTES + 10 * WINDOW_BYTES

    play(scene)


def test_without_a_token_no_message_is_read(play, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as client:
            for number in range(1, 11):
                call = await client.begin(GENERATE, [("authorization", "Bearer wrong")])
                await client.wait_for_ends(number, TIMEOUT_S)
                await client.send(call, MESSAGE_BYTES, short=10)
            assert client.num_sent == 0
        async with grpc.aio.insecure_channel(server.address) as channel:
            error = await refusal(channel.stream_stream(INFO)(timeout=TIMEOUT_S).read())
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED

    play(scene, token_file=tmp_path / "tokens")


def test_calls_past_the_unread_ones_are_refused_and_counted(play, caplog):
    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as client:
            await client.begin_many(35, GENERATE)
            await client.wait_for_ends(5, TIMEOUT_S)  # one connection may have 30 unread calls
            async with grpc.aio.insecure_channel(server.address) as channel:
                calls = [channel.stream_stream(GENERATE)(timeout=TIMEOUT_S) for _ in range(11)]
                error = await refusal(asyncio.gather(*(call.read() for call in calls)))  # the first call that ends
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert error.details() == "40 calls have not sent their message; try again later"
                assert 0.5 < retry_after_s(error.trailing_metadata()) < 2
            assert server.num_refused == 6
            await asyncio.sleep(1.2)
        assert "5 times within 1 s: calls refused: 30 calls of this connection have not sent" in caplog.text
        assert "1 times within 1 s: calls refused: 40 calls have not sent their message" in caplog.text

    play(scene)


def test_half_sent_messages_delay_others_by_a_moment(play):
    """All readers are taken by messages that do not arrive, and one more such call waits for a reader."""

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as first, HalfSender(server.address) as second:
            for client in (first, second):
                await client.begin_many(2, GENERATE)
            await asyncio.sleep(0.2)
            async with grpc.aio.insecure_channel(server.address) as channel:
                began = asyncio.get_running_loop().time()
                assert await server.generate(channel) == "text"
                assert asyncio.get_running_loop().time() - began < message_reading.MESSAGE_S / 2

    play(scene)


def test_one_connection_leaves_readers_to_others(play, monkeypatch):
    monkeypatch.setattr(message_reading, "CONTENDED_S", TIMEOUT_S)

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as client:
            await client.begin_many(10, GENERATE)
            await asyncio.sleep(0.2)
            async with grpc.aio.insecure_channel(server.address) as channel:
                assert await server.generate(channel) == "text"
            assert not client.ended

    play(scene)


def test_reflection_answers_many_questions(play):
    async def scene(server: Served) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([ask] * 3), timeout=TIMEOUT_S
            )
            assert len([answer async for answer in call]) == 3

    play(scene)


def test_each_call_of_a_burst_learns_why_it_is_refused(play, monkeypatch):
    """By default gRPC drops calls with CANCELLED while 1000 calls wait to be accepted."""
    monkeypatch.setattr(message_reading, "MESSAGE_S", 10 * TIMEOUT_S)
    monkeypatch.setattr(message_reading, "CONTENDED_S", 10 * TIMEOUT_S)
    limits = replace(LIMITS, max_unread=800, max_unread_of_peer=30)

    async def scene(server: Served) -> None:
        async with HalfSender(server.address) as client:
            num_calls = dict(limits.options())["grpc.max_concurrent_streams"]
            await client.begin_many(num_calls, GENERATE)
            await client.wait_for_ends(num_calls - 30, TIMEOUT_S)
            assert server.num_refused == len(client.ended) == num_calls - 30 > 1500
            assert not client.dropped

    play(scene, limits=limits)
