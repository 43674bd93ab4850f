"""Clients that read slowly, or not at all: what waits for them, for how long, and what it is to the others."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from engine_scene import make_target
from serving import serving

from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.errors import ServerError
from draftwire.contract.retry import retry_after_s
from draftwire.contract.validation import build_sampling_params, speculative_config_from_mapping
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api import response_stream as unread_module
from verifier_service.api.requests import RequestHandler
from verifier_service.api.response_stream import MAX_MESSAGES, ResponseStream
from verifier_service.core.request import Request
from verifier_service.engine.engine import EngineLimits
from verifier_service.host.access import InProcessEngine, Submission
from verifier_service.host.host import EngineHost

WAIT_S = 240.0
# A window that a few messages fill, and that does not grow.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
MAX_TOKENS = 50


def piece(number: int, text: str) -> pb.GenerateResponse:
    """A message of two tokens, of which the second brings the rest of the text."""
    return pb.GenerateResponse(
        token_ids=[2 * number, 2 * number + 1], drafted=[True, False], text=text, token_text_ends=[1, len(text)]
    )


def taken(unread: ResponseStream, count: int) -> list[pb.GenerateResponse]:
    async def take() -> list[pb.GenerateResponse]:
        return [await unread.next_message() for _ in range(count)]

    return asyncio.run(take())


def test_messages_come_one_by_one_to_a_client_that_keeps_up():
    unread = ResponseStream()
    pieces = [piece(number, "ab") for number in range(MAX_MESSAGES)]
    for one in pieces:
        unread.put(one)
    assert taken(unread, len(pieces)) == pieces


def test_outputs_merge_each_with_itself():
    """The last messages come when each output has its own."""
    unread, num_pieces = ResponseStream(2), 3 * MAX_MESSAGES
    for number in range(num_pieces):
        for index in range(2):
            message = piece(number, "ab" if index == 0 else "xy")
            message.index = index
            unread.put(message)
    for index in (1, 0):
        assert not unread.has_ended
        unread.put(pb.GenerateResponse(index=index, finish_reason=pb.FINISH_REASON_STOP))
    assert unread.is_finished
    messages = []
    while sum(one.finish_reason == pb.FINISH_REASON_STOP for one in messages) < 2:
        messages += taken(unread, 1)
    assert len(messages) <= MAX_MESSAGES
    for index, text in enumerate(("ab", "xy")):
        own = [one for one in messages if one.index == index]
        assert "".join(one.text for one in own) == text * num_pieces
        assert [token for one in own for token in one.token_ids] == list(range(2 * num_pieces))


def test_past_the_bound_neighbours_merge_and_nothing_is_lost():
    unread, total = ResponseStream(), 20 * MAX_MESSAGES
    texts = [chr(0x4E00 + number) + "x" * (1 + number % 3) for number in range(total)]
    for number, text in enumerate(texts):
        unread.put(piece(number, text))
    last = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, statistics=pb.RequestStatistics(output_tokens=9))
    unread.put(last)
    messages = []
    while not messages or messages[-1].finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        messages += taken(unread, 1)
    assert len(messages) <= MAX_MESSAGES
    assert [token for one in messages for token in one.token_ids] == list(range(2 * total))
    assert [flag for one in messages for flag in one.drafted] == [True, False] * total
    assert "".join(one.text for one in messages) == "".join(texts)
    ends, before = [], 0
    for one in messages:
        ends += [before + end for end in one.token_text_ends]
        before += len(one.text)
    starts = [sum(map(len, texts[:number])) for number in range(0, total, 97)]
    assert [ends[2 * number] for number in range(0, total, 97)] == [start + 1 for start in starts]
    assert messages[-1].statistics.output_tokens == 9


def test_an_error_comes_after_the_messages():
    unread = ResponseStream()
    unread.put(piece(0, "ab"))
    unread.put(ServerError("it broke"))
    assert taken(unread, 1) == [piece(0, "ab")]
    with pytest.raises(ServerError, match="it broke"):
        taken(unread, 1)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[RequestHandler, EngineHost, str]]:
    limits = EngineLimits(max_num_seqs=4, max_queue=8, max_prefill_rows=64, num_blocks=33, draft_deadline_s=None)
    config = speculative_config_from_mapping({})
    host = EngineHost(make_target(), config, limits, [], LOOPBACK)
    handler = RequestHandler(InProcessEngine(host), None, config, lambda: None)
    async with serving(handler) as address:
        yield handler, host, address


def request() -> pb.GenerateRequest:
    """Most of what the target's context holds, with log probabilities, so that messages are large."""
    params = build_sampling_params(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=15)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1, 4]), sampling_params=params)


async def tokens_of(call: grpc.aio.UnaryStreamCall, pause_s: float = 0) -> list[int]:
    """What is still to be read, with a pause after each message."""
    tokens: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
        await asyncio.sleep(pause_s)
    return tokens


@pytest.mark.full
def test_a_client_that_does_not_read_delays_no_other():
    async def run() -> None:
        async with served() as (_, _, address), grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow:
            stalled = [GenerationStub(slow).Generate(request()) for _ in range(4)]  # all places of the batch
            first = [(await call.read()).token_ids for call in stalled]
            async with grpc.aio.insecure_channel(address) as channel:
                whole = await tokens_of(GenerationStub(channel).Generate(request()))
            assert len(whole) == MAX_TOKENS
            assert [[*begin, *await tokens_of(call)] for begin, call in zip(first, stalled, strict=True)] == 4 * [whole]

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.full
def test_a_client_that_never_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", 0.2)

    async def run() -> None:
        async with served() as (handler, _, address), grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow:
            call = GenerationStub(slow).Generate(request())
            await call.read()
            while handler.open_outputs:
                await asyncio.sleep(0.02)
            # What was on its way is still delivered; the status follows it.
            with pytest.raises(grpc.RpcError) as ended:
                await tokens_of(call)
            assert ended.value.code() == grpc.StatusCode.ABORTED
            assert "has not read for 0.2 s" in ended.value.details()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.full
def test_a_client_that_reads_ever_so_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", WAIT_S)
    monkeypatch.setattr(unread_module, "READ_S", 1.0)

    async def run() -> None:
        async with served() as (handler, _, address), grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow:
            call = GenerationStub(slow).Generate(request())
            await call.read()
            while not all(unread.is_finished for unread in handler.open_outputs):
                await asyncio.sleep(0.02)
            with pytest.raises(grpc.RpcError) as ended:
                await tokens_of(call, pause_s=0.2)
            assert ended.value.code() == grpc.StatusCode.ABORTED
            assert "has not read all of the output 1 s after its end" in ended.value.details()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def held() -> list[Request | Submission | ResponseStream]:
    """What there is of requests in this process."""
    return [one for one in gc.get_objects() if type(one) in (Request, Submission, ResponseStream)]


@pytest.mark.full
def test_nothing_is_kept_of_abandoned_output_without_a_reader(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", 2.0)
    others = held()  # of tests before

    async def run() -> None:
        async with served() as (handler, _, address), grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow:
            calls = [GenerationStub(slow).Generate(request()) for _ in range(4)]
            for call in calls:
                await call.read()
            kept = [weakref.ref(one) for one in held() if id(one) not in map(id, others)]
            assert len(kept) >= 2 * len(calls)
            while handler.open_outputs:
                await asyncio.sleep(0.02)
            while any(one() is not None for one in kept):
                await asyncio.sleep(0.1)
                gc.collect()
            for call in calls:
                call.cancel()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.full
def test_no_more_requests_are_open_than_a_batch_beside_the_known():
    async def run() -> None:
        async with served() as (handler, _, address), grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow:
            stub, held = GenerationStub(slow), []
            most = 4 + 8 + 4  # a batch, a queue, and a batch that is on its way to its clients
            while len(held) < most:
                call = stub.Generate(request())
                await call.read()
                held.append(call)
            while not all(unread.is_finished for unread in handler.open_outputs):
                await asyncio.sleep(0.02)
            async with grpc.aio.insecure_channel(address) as channel:
                refused = GenerationStub(channel).Generate(request())
                with pytest.raises(grpc.RpcError) as error:
                    await tokens_of(refused)
                assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert error.value.details() == "16 outputs wait for clients that read slowly; try again later"
                assert retry_after_s(error.value.trailing_metadata()) > 0
                assert len(handler.open_outputs) == most
                await tokens_of(held.pop())
                assert len(await tokens_of(GenerationStub(channel).Generate(request()))) == MAX_TOKENS
            for call in held:
                assert await tokens_of(call)
            assert not handler.open_outputs

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.full
def test_the_requests_of_clients_that_go_leave_the_batch():
    async def run() -> None:
        async with served() as (handler, host, address):
            for reads in (True, False):
                channel = grpc.aio.insecure_channel(address, SMALL_WINDOW)
                calls = [GenerationStub(channel).Generate(request()) for _ in range(4)]
                for call in calls:
                    await call.read()
                while reads and await calls[0].read() is not grpc.aio.EOF:
                    pass
                await channel.close()
                while handler.open_outputs or host.engine.scheduler.running:
                    await asyncio.sleep(0.02)
                assert host.engine.kv_cache_usage == 0
            async with grpc.aio.insecure_channel(address) as channel:
                assert len(await tokens_of(GenerationStub(channel).Generate(request()))) == MAX_TOKENS

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
