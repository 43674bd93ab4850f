"""Responses to clients: their text, and clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from service_scene import MAX_TOKENS, WAIT_S, Served, error_of, outputs_of, play, request, served, stub_of, tokens_of

from draftwire.contract.errors import ServerError
from draftwire.contract.retry import retry_after_s
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api import response_stream as unread_module
from verifier_service.api.response_stream import MAX_MESSAGES, ResponseStream
from verifier_service.core.request import Request
from verifier_service.host.access import Submission

# A window of constant size that a few messages fill.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


def piece(number: int, text: str) -> pb.GenerateResponse:
    """Return a message of two tokens; the second has the rest of the text."""
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
    """The stream is finished when each output has its last message."""
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


def large_request() -> pb.GenerateRequest:
    """Return a request that fills most of the context, with log probabilities so that messages are large."""
    return request(logprobs=15)


@asynccontextmanager
async def slow_client() -> AsyncIterator[tuple[Served, GenerationStub, GenerationStub]]:
    """Serve; yield the scene and the stubs of a client with a small window and of another one."""
    scene = served(behind_socket=False, max_num_seqs=4, max_queue=8)
    async with (
        scene.serve() as address,
        grpc.aio.insecure_channel(address, SMALL_WINDOW) as slow,
        grpc.aio.insecure_channel(address) as other,
    ):
        yield scene, GenerationStub(slow), GenerationStub(other)


@pytest.mark.full
@play
async def test_a_client_that_does_not_read_delays_no_other():
    async with slow_client() as (_, slow, other):
        stalled = [slow.Generate(large_request()) for _ in range(4)]  # all slots of the batch
        first = [await call.read() for call in stalled]
        whole = tokens_of(await outputs_of(other.Generate(large_request())))
        assert len(whole) == MAX_TOKENS
        for begin, call in zip(first, stalled, strict=True):
            assert tokens_of([begin, *await outputs_of(call)]) == whole


@pytest.mark.full
@play
async def test_a_client_that_never_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", 0.2)
    async with slow_client() as (scene, slow, _):
        call = slow.Generate(large_request())
        await call.read()
        while scene.handler.open_outputs:
            await asyncio.sleep(0.02)
        # Messages already sent are still delivered, before the status.
        code, details = await error_of(outputs_of(call))
        assert code == grpc.StatusCode.ABORTED
        assert "has not read for 0.2 s" in details


@pytest.mark.full
@play
async def test_a_client_that_reads_ever_so_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", WAIT_S)
    monkeypatch.setattr(unread_module, "READ_S", 1.0)
    async with slow_client() as (scene, slow, _):
        call = slow.Generate(large_request())
        await call.read()
        while not all(unread.is_finished for unread in scene.handler.open_outputs):
            await asyncio.sleep(0.02)
        code, details = await error_of(outputs_of(call, pause_s=0.2))
        assert code == grpc.StatusCode.ABORTED
        assert "has not read all of the output 1 s after its end" in details


def held() -> list[Request | Submission | ResponseStream]:
    """Return all objects of requests in this process."""
    return [one for one in gc.get_objects() if type(one) in (Request, Submission, ResponseStream)]


@pytest.mark.full
@play
async def test_nothing_is_kept_of_abandoned_output_without_a_reader(monkeypatch):
    monkeypatch.setattr(unread_module, "STALL_S", 2.0)
    others = held()  # of earlier tests
    async with slow_client() as (scene, slow, _):
        calls = [slow.Generate(large_request()) for _ in range(4)]
        for call in calls:
            await call.read()
        kept = [weakref.ref(one) for one in held() if id(one) not in map(id, others)]
        assert len(kept) >= 2 * len(calls)
        while scene.handler.open_outputs:
            await asyncio.sleep(0.02)
        while any(one() is not None for one in kept):
            await asyncio.sleep(0.1)
            gc.collect()
        for call in calls:
            call.cancel()


@pytest.mark.full
@play
async def test_no_more_requests_are_open_than_a_batch_beside_the_known():
    async with slow_client() as (scene, slow, other):
        held, most = [], 4 + 8 + 4  # a batch, a queue, and a batch whose output is being sent
        while len(held) < most:
            held.append(slow.Generate(large_request()))
            await held[-1].read()
        while not all(unread.is_finished for unread in scene.handler.open_outputs):
            await asyncio.sleep(0.02)
        refused = other.Generate(large_request())
        details = "16 outputs wait for clients that read slowly; try again later"
        assert await error_of(outputs_of(refused)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        assert retry_after_s(await refused.trailing_metadata()) > 0
        assert len(scene.handler.open_outputs) == most
        await outputs_of(held.pop())
        assert len(tokens_of(await outputs_of(other.Generate(large_request())))) == MAX_TOKENS
        for call in held:
            assert await outputs_of(call)
        assert not scene.handler.open_outputs


@pytest.mark.full
@play
async def test_the_requests_of_clients_that_go_leave_the_batch():
    scene = served(behind_socket=False, max_num_seqs=4, max_queue=8)
    engine = scene.host.engine
    async with scene.serve() as address:
        for reads in (True, False):
            channel = grpc.aio.insecure_channel(address, SMALL_WINDOW)
            calls = [GenerationStub(channel).Generate(large_request()) for _ in range(4)]
            for call in calls:
                await call.read()
            while reads and await calls[0].read() is not grpc.aio.EOF:
                pass
            await channel.close()
            await scene.until_idle()
            assert engine.kv_cache_usage == 0
        async with grpc.aio.insecure_channel(address) as channel:
            assert len(tokens_of(await outputs_of(GenerationStub(channel).Generate(request())))) == MAX_TOKENS


class Letters:
    """A tokenizer with one letter per token that fails if it meets `broken` more than `times` times."""

    silent_ids = frozenset[int]()
    longest_token_bytes = 1

    def __init__(self, broken: str = "", times: int = 0) -> None:
        self.threads: set[str] = set()
        self._broken = broken
        self._times = times

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode_all(self, ids: list[int]) -> str:
        return self.decode(ids)

    def decode(self, ids: list[int]) -> str:
        self.threads.add(threading.current_thread().name)
        text = "".join(chr(ord("a") + token) for token in ids)
        if self._broken and self._broken in text:
            self._times -= 1
            if self._times < 0:
                raise ValueError("no such token")
        return text


def text_of(messages: list[pb.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
@play
async def test_text_is_made_off_the_engine_s_thread(behind_socket):
    """On the engine's thread, between two steps, text of one request would delay all others."""
    codec = Letters()
    async with stub_of(served(behind_socket=behind_socket, codec=codec)) as stub:
        assert len(text_of(await outputs_of(stub.Generate(request())))) == MAX_TOKENS
    assert codec.threads == {threading.main_thread().name}


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
@play
async def test_nothing_behind_a_stop_text_reaches_the_client(behind_socket):
    """The engine learns of the stop late; counts and log probabilities still end with the text."""
    own = served(behind_socket=behind_socket, codec=Letters())
    async with stub_of(own) as stub:
        whole = text_of(await outputs_of(stub.Generate(request(logprobs=1))))
        stop = whole[7:10]
        end = whole.index(stop)
        messages = await outputs_of(stub.Generate(request(logprobs=1, stop=[stop])))
        last = messages[-1]
        assert text_of(messages) == whole[:end]
        assert (last.finish_reason, last.stop_text) == (pb.FINISH_REASON_STOP, stop)
        assert len(tokens_of(messages)) == end + len(stop)
        assert sum(len(message.logprobs) for message in messages) == end + len(stop)
        assert last.statistics.output_tokens == last.statistics.verify_tokens + 1 == end + len(stop)
        assert not any(message.HasField("statistics") for message in messages[:-1])
        await own.until_idle()
        ended = next(one for one in own.host.collector.collect() if one.name == "draftwire_request_success")
        counts = {sample.labels["finished_reason"]: sample.value for sample in ended.samples}
        assert (counts["length"], counts["stop"], counts["abort"]) == (1, 1, 0)


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
@play
async def test_a_request_whose_text_cannot_be_made_ends_alone(behind_socket):
    """The request fails in the middle of its output; its tokens are all f, the other request's all g."""
    own = served(behind_socket=behind_socket, codec=Letters("f", times=6))
    async with stub_of(own) as stub:
        broken = stub.Generate(request(logit_bias={5: 100.0}))
        other = stub.Generate(request(logit_bias={6: 100.0}))
        _, details = await error_of(outputs_of(broken))
        assert details == "the output cannot be decoded: no such token"
        assert text_of(await outputs_of(other)) == "g" * MAX_TOKENS
        await own.until_idle()
