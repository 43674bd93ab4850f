"""The Python clients against a scripted server."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import typing

import grpc
import pytest

from draftwire import AsyncClient, Chunk, Client, Completion, Statistics
from draftwire.client.output import TokenLogprobs
from draftwire.client.request import Options, SamplingOptions, build_request
from draftwire.contract.errors import InvalidArgumentError, QueueFullError, RequestError
from draftwire.contract.retry import DETAILS_KEY, retry_metadata
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb

EXPECTED_STATISTICS = Statistics(
    prompt_tokens=3,
    output_tokens=4,
    verify_steps=2,
    verify_tokens=4,
    drafted=(2, 2),
    accepted=(2, 0),
    time_to_first_token_s=0.25,
    total_time_s=0.5,
)
EXPECTED_CHUNKS = [
    Chunk(
        text="é b ",
        token_ids=(5, 6, 7),
        drafted=(False, True, False),
        token_text_ends=(1, 3, 4),
        request_id="r-1",
    ),
    Chunk(
        text="end",
        token_ids=(8,),
        drafted=(True,),
        token_text_ends=(3,),
        finish_reason="stop",
        stop_token_id=8,
        statistics=EXPECTED_STATISTICS,
        request_id="r-1",
    ),
]


def test_generate_yields_typed_chunks(verifier):
    with Client(verifier.address) as client:
        assert list(client.generate("abc")) == EXPECTED_CHUNKS


def test_complete_joins_the_chunks(verifier):
    with Client(verifier.address) as client:
        completion = client.complete("abc")
    assert completion == Completion(
        text="é b end",
        token_ids=(5, 6, 7, 8),
        drafted=(False, True, False, True),
        token_text_ends=(1, 3, 4, 7),
        logprobs=(),
        finish_reason="stop",
        stop_text=None,
        stop_token_id=8,
        statistics=EXPECTED_STATISTICS,
        request_id="r-1",
    )


def test_the_asyncio_client_gives_the_same(verifier):
    async def use():
        async with AsyncClient(verifier.address) as client:
            chunks = [chunk async for chunk in client.generate("abc")]
            return chunks, await client.complete("abc"), await client.info()

    chunks, completion, info = asyncio.run(use())
    assert chunks == EXPECTED_CHUNKS
    assert completion.text == "é b end"
    assert info.vocab_size == 99


def test_info_tells_what_is_served(verifier):
    with Client(verifier.address) as client:
        assert client.info().target == "demo"


def test_pieces_give_each_token_its_text():
    chunk = Chunk(text="abcd", drafted=(True, False, True), token_text_ends=(2, 2, 3))
    assert list(chunk.pieces()) == [("ab", True), ("c", True), ("d", False)]


def test_pieces_without_text_ends_are_one_piece():
    assert list(Chunk(text="abcd", drafted=(True,)).pieces()) == [("abcd", False)]


def test_logprobs_become_tuples(verifier):
    entry = pb.TokenLogprobs(logprob=-0.5, rank=2, top_ids=[4, 5], top_logprobs=[-0.25, -0.5])
    verifier.script[0].logprobs.append(entry)
    with Client(verifier.address) as client:
        first = next(client.generate("abc", logprobs=2))
    verifier.script[0].logprobs.pop()
    assert first.logprobs == (TokenLogprobs(-0.5, 2, ((4, -0.25), (5, -0.5))),)


def test_statistics_derive_lengths_and_rates():
    assert EXPECTED_STATISTICS.acceptance_length == 2.0
    assert EXPECTED_STATISTICS.acceptance_rates == (1.0, 0.0)
    assert EXPECTED_STATISTICS.tokens_per_second == 8.0
    assert Statistics().acceptance_length is None
    assert Statistics().tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", pb.GenerateRequest(text="text")),
        ([1, 2], pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        ((1, 2), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        (
            [{"role": "user", "content": "hi"}],
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])),
        ),
    ],
)
def test_prompt_is_text_ids_or_messages(prompt, expected):
    request, timeout = build_request(prompt, {})
    expected.sampling_params.SetInParent()
    assert request == expected
    assert timeout is None


def test_every_sampling_parameter_is_an_option():
    assert list(SamplingOptions.__annotations__) == [f.name for f in config_pb2.SamplingParams.DESCRIPTOR.fields]


def test_options_reach_the_server(verifier):
    options: Options = {
        "temperature": 0.5,
        "top_k": 0,
        "logit_bias": {7: -1.0},
        "seed": -3,
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_p": None,
        "num_speculative_tokens": 0,
        "request_id": "mine",
        "timeout": 20,
    }
    with Client(verifier.address) as client:
        client.complete("abc", **options)
    (request,) = verifier.requests
    params = request.sampling_params
    assert (params.temperature, params.top_k, dict(params.logit_bias), params.seed) == (0.5, 0, {7: -1.0}, -3)
    assert (list(params.stop), list(params.stop_token_ids), params.ignore_eos) == (["x"], [9], True)
    assert params.HasField("top_k")
    assert not params.HasField("min_p")
    assert request.HasField("num_speculative_tokens")
    assert (request.num_speculative_tokens, request.request_id) == (0, "mine")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt = ''"),
        ([], {}, "prompt = []"),
        (b"abc", {}, "prompt = b'abc'"),
        (None, {}, "prompt = None"),
        ([1, "a"], {}, "prompt = [1, 'a']"),
        ([1, -1], {}, "prompt = [1, -1]"),
        ([True], {}, "prompt = [True]"),
        ([1.5], {}, "prompt = [1.5]"),
        ("\ud800", {}, "prompt = "),
        ([{"role": "", "content": "x"}], {}, "chat.messages.role = ''"),
        ([{"role": "user", "text": "x"}], {}, "chat.messages.text = 'x': unknown name"),
        ([{"role": "r" * 65, "content": "x"}], {}, "allowed length 1 to 64 bytes, got 65"),
        pytest.param("x" * 2**24, {}, "prompt = a message of 16777223 bytes: at most 16777216 bytes", id="long"),
        ("x", {"temperature": -1}, "sampling_params.temperature = -1.0: allowed range [0, inf)"),
        ("x", {"temprature": 1}, "temprature = 1: unknown option"),
        ("x", {"num_speculative_tokens": 17}, "num_speculative_tokens = 17: allowed range [0, 16]"),
        ("x", {"request_id": ""}, "request_id = ''"),
        ("x", {"timeout": 0}, "timeout = 0: must be a number of seconds above 0"),
        ("x", {"timeout": float("nan")}, "timeout = nan"),
        ("x", {"min_tokens": 5, "max_tokens": 4}, "sampling_params.min_tokens = 5: allowed range [0, max_tokens = 4]"),
    ],
)
def test_wrong_requests_are_refused_before_they_are_sent(verifier, prompt, options, message):
    with Client(verifier.address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.generate(prompt, **options)
    assert message in str(caught.value)
    assert not verifier.requests


def test_a_lone_stop_text_is_one_stop_text(verifier):
    with Client(verifier.address) as client:
        client.complete("abc", stop="xyz")
    assert list(verifier.requests[0].sampling_params.stop) == ["xyz"]


@pytest.mark.parametrize(
    "address",
    ["localhost", "localhost:http", ":50051", "localhost:99999", "localhost:²", "http://localhost:50051"],
)
def test_wrong_address_is_refused(address):
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match="must be HOST:PORT"):
            kind(address)


def test_invalid_argument_of_the_server_keeps_its_text_and_field(verifier):
    text = "sampling_params.stop_token_ids = 999: token ids must be in [0, 99)"
    verifier.script, verifier.failure = [], (grpc.StatusCode.INVALID_ARGUMENT, text)
    with Client(verifier.address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.complete("abc")
    assert str(caught.value) == text
    assert (caught.value.field, caught.value.value) == ("sampling_params.stop_token_ids", "999")
    assert caught.value.allowed == "token ids must be in [0, 99)"


def test_full_queue_is_an_error_of_its_own(verifier):
    verifier.script, verifier.failure = [], (grpc.StatusCode.RESOURCE_EXHAUSTED, "256 requests wait")
    with Client(verifier.address) as client, pytest.raises(QueueFullError, match="256 requests wait"):
        client.complete("abc")


def test_failure_in_mid_stream_comes_after_the_chunks(verifier):
    verifier.script, verifier.failure = verifier.script[:1], (grpc.StatusCode.INTERNAL, "NaN logits")
    with Client(verifier.address) as client:
        stream = client.generate("abc")
        assert next(stream) == EXPECTED_CHUNKS[0]
        with pytest.raises(RequestError, match="NaN logits") as caught:
            next(stream)
    assert caught.value.status == "INTERNAL"


def test_failures_are_not_retried(verifier):
    verifier.script, verifier.failure = [], (grpc.StatusCode.UNAVAILABLE, "shutting down")
    with Client(verifier.address) as client, pytest.raises(RequestError, match="shutting down"):
        client.complete("abc")
    assert len(verifier.requests) == 1


def test_unreachable_server_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with Client(address) as client, pytest.raises(RequestError, match=f"{address} cannot be reached") as caught:
            client.complete("abc")
    assert caught.value.status == "UNAVAILABLE"


def test_stream_without_its_end_is_an_error(verifier):
    verifier.script = verifier.script[:1]
    with Client(verifier.address) as client, pytest.raises(RequestError, match="without a finish reason"):
        client.complete("abc")


def test_timeout_ends_the_request(verifier):
    verifier.endless = True
    with Client(verifier.address) as client, pytest.raises(RequestError, match=r"timeout of 3 s") as caught:
        client.complete("abc", timeout=3)
    assert caught.value.status == "DEADLINE_EXCEEDED"
    assert verifier.left.wait(120)


@pytest.mark.parametrize("how", ["cancel", "leave", "drop"])
def test_abandoned_stream_is_cancelled_in_the_server(verifier, how):
    verifier.endless = True
    with Client(verifier.address) as client:
        stream = client.generate("abc")
        next(stream)
        assert not verifier.left.is_set()
        if how == "cancel":
            stream.cancel()
            assert list(stream) == []
        elif how == "leave":
            with stream:
                pass
        else:
            del stream
            gc.collect()
        assert verifier.left.wait(120)


@pytest.mark.parametrize("how", ["cancel", "leave", "drop", "task"])
def test_abandoned_async_stream_is_cancelled_in_the_server(verifier, how):
    verifier.endless = True

    async def use() -> None:
        async with AsyncClient(verifier.address) as client:
            stream = client.generate("abc")
            await anext(stream)
            assert not verifier.left.is_set()
            if how == "cancel":
                reader = asyncio.create_task(_collect(stream))
                await asyncio.sleep(0.05)
                stream.cancel()
                assert await reader == []
            elif how == "leave":
                async with stream:
                    pass
            elif how == "drop":
                del stream
                gc.collect()
            else:
                reader = asyncio.create_task(_collect(stream))
                await asyncio.sleep(0.05)
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            assert await asyncio.to_thread(verifier.left.wait, 120)

    asyncio.run(use())


async def _collect(stream: typing.AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def test_asyncio_errors_are_mapped_too(verifier):
    verifier.script, verifier.failure = [], (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def use() -> None:
        async with AsyncClient(verifier.address) as client:
            await client.complete("abc")

    with pytest.raises(QueueFullError, match="full"):
        asyncio.run(use())


@pytest.mark.parametrize("module", ["draftwire", "draftwire.client", "draftwire_cli.main", "draftwire_cli.generate"])
def test_import_is_light(module):
    heavy = "{'torch', 'transformers', 'tokenizers', 'numpy', 'drafter_service', 'verifier_service'}"
    code = (
        f"import sys, {module}; sys.exit(str(sorted({heavy} & set(sys.modules))) if {heavy} & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _retry_after(verifier, metadata: tuple[tuple[str, str | bytes], ...]) -> list[float | None]:
    """Return the retry times that both clients report for a full server."""
    verifier.script, verifier.failure = [], (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    verifier.failure_metadata = metadata
    with Client(verifier.address) as client, pytest.raises(QueueFullError) as refused:
        client.complete("abc")

    async def use() -> None:
        async with AsyncClient(verifier.address) as client:
            await client.complete("abc")

    with pytest.raises(QueueFullError) as refused_async:
        asyncio.run(use())
    return [refused.value.retry_after_s, refused_async.value.retry_after_s]


def test_a_full_server_tells_when_to_come_again(verifier):
    assert _retry_after(verifier, retry_metadata("full", 1.25)) == [1.25, 1.25]


@pytest.mark.parametrize("metadata", [(), ((DETAILS_KEY, b"\xff\xff"),), ((DETAILS_KEY, b""), ("other", "1"))])
def test_a_full_server_that_does_not_tell_is_no_other_error(verifier, metadata):
    assert _retry_after(verifier, metadata) == [None, None]
