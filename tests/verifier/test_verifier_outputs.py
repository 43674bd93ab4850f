"""Several outputs of one request: the noise of each, the prompt that they share, their ends, and the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from odd_tokenizers import codec_of, ids_request, served, word_tokenizer
from tiny_targets import CONTEXT

from draftwire.contract.validation import build_sampling_params
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.core.tokenizer import TextCodec

T = TypeVar("T")
PROMPT = [i % 18 + 2 for i in range(CONTEXT - 20)]
SHARED = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


def request(n: int, prompt: list[int] = PROMPT, **options: Any) -> pb.GenerateRequest:
    made = ids_request(prompt, build_sampling_params(**{"max_tokens": 12, "ignore_eos": True, **options}))
    made.n = n
    return made


def with_server(codec: TextCodec | None, run: Callable[[GenerationStub], Awaitable[T]]) -> T:
    async def serve() -> T:
        async with served(codec) as stub:
            return await run(stub)

    return asyncio.run(serve())


async def messages_of(stub: GenerationStub, made: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [message async for message in stub.Generate(made, timeout=60)]


def by_index(messages: list[pb.GenerateResponse], count: int) -> list[list[pb.GenerateResponse]]:
    return [[message for message in messages if message.index == index] for index in range(count)]


def tokens(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


@pytest.mark.parametrize("seed", [7, 2**63 - 2])
def test_output_i_is_that_of_the_seed_plus_i(seed: int) -> None:
    async def run(stub: GenerationStub) -> tuple[list[list[int]], list[list[int]]]:
        together = await messages_of(stub, request(4, seed=seed))
        seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(4)]
        alone = [tokens(await messages_of(stub, request(1, seed=own))) for own in seeds]
        return [tokens(own) for own in by_index(together, 4)], alone

    together, alone = with_server(None, run)
    assert together == alone
    assert len({tuple(own) for own in together}) == 4


def test_outputs_without_a_seed_differ() -> None:
    messages = with_server(None, lambda stub: messages_of(stub, request(3)))
    assert len({tuple(tokens(own)) for own in by_index(messages, 3)}) == 3


def test_each_output_has_its_end_and_the_prompt_is_computed_once() -> None:
    messages = with_server(None, lambda stub: messages_of(stub, request(3, seed=1)))
    assert [message.request_id != "" for message in messages] == [True] + [False] * (len(messages) - 1)
    hits = []
    for own in by_index(messages, 3):
        assert [message.HasField("statistics") for message in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert own[-1].statistics.output_tokens == len(tokens(own)) == 12
        assert own[-1].statistics.prompt_tokens == len(PROMPT)
        hits.append(own[-1].statistics.prefix_hit_tokens)
    assert hits == [0, SHARED, SHARED]


def test_a_stop_text_ends_its_own_output(tmp_path: Path) -> None:
    codec = codec_of(word_tokenizer(), tmp_path)

    async def run(stub: GenerationStub) -> tuple[list[pb.GenerateResponse], list[pb.GenerateResponse]]:
        plain = await messages_of(stub, request(3, seed=3))
        stop = f"w{tokens(by_index(plain, 3)[1])[4]} "  # of output 1
        return plain, await messages_of(stub, request(3, seed=3, stop=[stop]))

    plain, stopped = with_server(codec, run)
    outputs = list(zip(by_index(plain, 3), by_index(stopped, 3), strict=True))
    for whole, cut in outputs:
        assert tokens(cut) == tokens(whole)[: len(tokens(cut))]
        ended_by_stop = cut[-1].finish_reason == pb.FINISH_REASON_STOP
        assert ended_by_stop == (len(tokens(cut)) < 12 or cut[-1].HasField("stop_text"))
    assert len(tokens(outputs[1][1])) <= 6


def test_a_client_that_leaves_ends_all_outputs() -> None:
    async def run(stub: GenerationStub) -> list[int]:
        call = stub.Generate(request(8, prompt=[3, 1, 4], max_tokens=50))
        await call.read()
        call.cancel()
        for _ in range(1000):
            info = await stub.GetVerifierInfo(pb.GetVerifierInfoRequest())
            if info.requests_running + info.requests_waiting == 0:
                return tokens(await messages_of(stub, request(1)))
            await asyncio.sleep(0.01)
        raise AssertionError("outputs are still computed")

    assert len(with_server(None, run)) == 12


def refusal(error: BaseException) -> tuple[grpc.StatusCode, str]:
    assert isinstance(error, grpc.aio.AioRpcError)
    return error.code(), str(error.details())


def test_the_queue_counts_all_outputs() -> None:
    """The server takes 16 + 64 at once; 2 * 16 + 64 may be open."""

    async def run(stub: GenerationStub) -> list[Any]:
        many = [messages_of(stub, request(40, prompt=[3], max_tokens=40)) for _ in range(3)]
        return await asyncio.gather(*many, return_exceptions=True)

    results = with_server(None, run)
    refused = [refusal(result) for result in results if isinstance(result, BaseException)]
    assert len(refused) == 1
    assert refused[0][0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    for result in results:
        if isinstance(result, list):
            assert [len(tokens(own)) for own in by_index(result, 40)] == [40] * 40


@pytest.mark.parametrize(
    ("n", "words"),
    [(0, "n = 0: allowed range [1, 80] on this server"), (81, "n = 81: allowed range [1, 80] on this server")],
)
def test_more_outputs_than_there_is_ever_room_for_are_refused(n: int, words: str) -> None:
    async def run(stub: GenerationStub) -> tuple[grpc.StatusCode, str]:
        try:
            await messages_of(stub, request(n))
        except grpc.aio.AioRpcError as error:
            return refusal(error)
        raise AssertionError("it was taken")

    assert with_server(None, run) == (grpc.StatusCode.INVALID_ARGUMENT, words)
