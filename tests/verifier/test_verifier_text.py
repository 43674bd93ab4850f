"""Text is made where the clients are served: the engine's thread knows tokens alone."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from service_scene import MAX_TOKENS, WAIT_S, outputs_of, request, served

from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.host.host import EngineHost


class Letters:
    """A tokenizer of one letter for each token, which fails where it meets `broken` more than `times` times."""

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


async def until_idle(host: EngineHost) -> None:
    while host.engine.scheduler.running:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
def test_text_is_made_off_the_engine_s_thread(behind_socket):
    """It was made there, between two steps, where each request's text delays all others."""
    codec = Letters()

    async def run() -> None:
        async with (
            served(behind_socket=behind_socket, codec=codec).serve() as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            messages = await outputs_of(GenerationStub(channel).Generate(request()))
            assert len(text_of(messages)) == MAX_TOKENS

    asyncio.run(run())
    assert codec.threads == {threading.main_thread().name}


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
def test_nothing_behind_a_stop_text_reaches_the_client(behind_socket):
    """The engine learns of it late; counts and log probabilities end with the text all the same."""
    own = served(behind_socket=behind_socket, codec=Letters())

    async def run() -> None:
        async with own.serve() as address, grpc.aio.insecure_channel(address) as channel:
            stub = GenerationStub(channel)
            whole = text_of(await outputs_of(stub.Generate(request(logprobs=1))))
            stop = whole[7:10]
            end = whole.index(stop)
            messages = await outputs_of(stub.Generate(request(logprobs=1, stop=[stop])))
            last = messages[-1]
            assert text_of(messages) == whole[:end]
            assert (last.finish_reason, last.stop_text) == (pb.FINISH_REASON_STOP, stop)
            assert sum(len(message.token_ids) for message in messages) == end + len(stop)
            assert sum(len(message.logprobs) for message in messages) == end + len(stop)
            assert last.statistics.output_tokens == last.statistics.verify_tokens + 1 == end + len(stop)
            assert not any(message.HasField("statistics") for message in messages[:-1])
            await asyncio.wait_for(until_idle(own.host), WAIT_S)
            ended = next(one for one in own.host.collector.collect() if one.name == "draftwire_request_success")
            counts = {sample.labels["finished_reason"]: sample.value for sample in ended.samples}
            assert (counts["length"], counts["stop"], counts["abort"]) == (1, 1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("behind_socket", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_request_whose_text_cannot_be_made_ends_alone(behind_socket):
    """It fails in the middle of its output, of which every token is an f; the other request's are g."""
    own = served(behind_socket=behind_socket, codec=Letters("f", times=6))

    async def run() -> None:
        async with own.serve() as address, grpc.aio.insecure_channel(address) as channel:
            stub = GenerationStub(channel)
            broken = stub.Generate(request(logit_bias={5: 100.0}))
            other = stub.Generate(request(logit_bias={6: 100.0}))
            with pytest.raises(grpc.RpcError) as failure:
                await outputs_of(broken)
            assert failure.value.details() == "the output cannot be decoded: no such token"
            assert text_of(await outputs_of(other)) == "g" * MAX_TOKENS
            await asyncio.wait_for(until_idle(own.host), WAIT_S)

    asyncio.run(run())
