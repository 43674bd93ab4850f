"""Several outputs of one request, and the log probabilities of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from engine_scene import HIDDEN, NUM_LAYERS, K, Served, make_target
from odd_tokenizers import codec_of, ids_request, served, word_tokenizer
from service_scene import error_of, play, tokens_of
from tiny_targets import CONTEXT, VOCAB, tiny_model

from draftwire.contract.validation import build_sampling_params
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.sampling.logprobs import MOST_LIKELIEST

PROMPT = [i % 18 + 2 for i in range(CONTEXT - 20)]
SHARED = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


def request(n: int, prompt: list[int] = PROMPT, **options: Any) -> pb.GenerateRequest:
    made = ids_request(prompt, build_sampling_params(**{"max_tokens": 12, "ignore_eos": True, **options}))
    made.n = n
    return made


async def messages_of(stub: GenerationStub, made: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [message async for message in stub.Generate(made, timeout=60)]


def by_index(messages: list[pb.GenerateResponse], count: int) -> list[list[pb.GenerateResponse]]:
    return [[message for message in messages if message.index == index] for index in range(count)]


@pytest.mark.parametrize("seed", [7, 2**63 - 2])
@play
async def test_output_i_is_that_of_the_seed_plus_i(seed: int) -> None:
    async with served(None) as stub:
        together = by_index(await messages_of(stub, request(4, seed=seed)), 4)
        seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(4)]
        alone = [tokens_of(await messages_of(stub, request(1, seed=own))) for own in seeds]
    assert list(map(tokens_of, together)) == alone
    assert len(set(map(tuple, alone))) == 4


@play
async def test_outputs_without_a_seed_differ() -> None:
    async with served(None) as stub:
        messages = await messages_of(stub, request(3))
    assert len({tuple(tokens_of(own)) for own in by_index(messages, 3)}) == 3


@play
async def test_each_output_has_its_end_and_the_prompt_is_computed_once() -> None:
    async with served(None) as stub:
        messages = await messages_of(stub, request(3, seed=1))
    assert [message.request_id != "" for message in messages] == [True] + [False] * (len(messages) - 1)
    hits = []
    for own in by_index(messages, 3):
        assert [message.HasField("statistics") for message in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert own[-1].statistics.output_tokens == len(tokens_of(own)) == 12
        assert own[-1].statistics.prompt_tokens == len(PROMPT)
        hits.append(own[-1].statistics.prefix_hit_tokens)
    assert hits == [0, SHARED, SHARED]


@play
async def test_a_stop_text_ends_its_own_output(tmp_path: Path) -> None:
    async with served(codec_of(word_tokenizer(), tmp_path)) as stub:
        plain = by_index(await messages_of(stub, request(3, seed=3)), 3)
        stop = f"w{tokens_of(plain[1])[4]} "
        stopped = by_index(await messages_of(stub, request(3, seed=3, stop=[stop])), 3)
    for whole, cut in zip(plain, stopped, strict=True):
        assert tokens_of(cut) == tokens_of(whole)[: len(tokens_of(cut))]
        ended_by_stop = cut[-1].finish_reason == pb.FINISH_REASON_STOP
        assert ended_by_stop == (len(tokens_of(cut)) < 12 or cut[-1].HasField("stop_text"))
    assert len(tokens_of(stopped[1])) <= 6


@play
async def test_a_client_that_leaves_ends_all_outputs() -> None:
    async with served(None) as stub:
        call = stub.Generate(request(8, prompt=[3, 1, 4], max_tokens=50))
        await call.read()
        call.cancel()
        info = await stub.GetVerifierInfo(pb.GetVerifierInfoRequest())
        while info.requests_running + info.requests_waiting > 0:
            await asyncio.sleep(0.01)
            info = await stub.GetVerifierInfo(pb.GetVerifierInfoRequest())
        assert len(tokens_of(await messages_of(stub, request(1)))) == 12


@play
async def test_the_queue_counts_all_outputs() -> None:
    """A request may have 16 + 64 outputs; 2 * 16 + 64 outputs may be open."""
    async with served(None) as stub:
        many = [messages_of(stub, request(40, prompt=[3], max_tokens=40)) for _ in range(3)]
        results = await asyncio.gather(*many, return_exceptions=True)
    (refused,) = [result for result in results if isinstance(result, BaseException)]
    assert isinstance(refused, grpc.aio.AioRpcError)
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for result in results:
        if isinstance(result, list):
            assert [len(tokens_of(own)) for own in by_index(result, 40)] == [40] * 40


@pytest.mark.parametrize("n", [0, 81])
@play
async def test_more_outputs_than_there_is_ever_room_for_are_refused(n: int) -> None:
    async with served(None) as stub:
        words = f"n = {n}: allowed range [1, 80] on this server"
        assert await error_of(messages_of(stub, request(n))) == (grpc.StatusCode.INVALID_ARGUMENT, words)


LONG_PROMPT = [7 * i % 19 + i // 19 % 2 for i in range(45)]


def plain_logprobs(prompt: Sequence[int]) -> torch.Tensor:
    """Return log probabilities [len(prompt) - 1, VOCAB] of a forward pass of transformers."""
    return tiny_model(NUM_LAYERS, HIDDEN, "eager")(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)


def check(messages: Sequence[pb.GenerateResponse], prompt: Sequence[int], num_top: int) -> None:
    entries = [entry for message in messages for entry in message.prompt_logprobs]
    expected = plain_logprobs(prompt)
    assert len(entries) == len(prompt) - 1
    for row, token, entry in zip(expected, prompt[1:], entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert list(entry.top_ids) == row.topk(num_top).indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
    first_output = next(i for i, message in enumerate(messages) if message.token_ids)
    assert not any(message.prompt_logprobs for message in messages[first_output:])


@pytest.mark.usefixtures("scheduling")
@pytest.mark.parametrize(("max_num_seqs", "prefill_rows"), [(8, 64), (8, 7), (1, 64), (3, 10)], ids=str)
@pytest.mark.parametrize("num_top", [0, 3, MOST_LIKELIEST])
def test_each_token_has_that_of_a_plain_forward_pass(max_num_seqs: int, prefill_rows: int, num_top: int) -> None:
    with Served(make_target(), max_num_seqs=max_num_seqs, max_prefill_rows=prefill_rows) as own:
        request = own.submit(LONG_PROMPT, prompt_logprobs=num_top, max_tokens=4)
        plain = own.submit(LONG_PROMPT, max_tokens=4)
        messages = own.messages(request)
        check(messages, LONG_PROMPT, num_top)
        assert [token for message in messages for token in message.token_ids] == own.tokens(plain)


def test_rows_in_the_cache_are_computed_again() -> None:
    with Served(make_target()) as own:
        own.tokens(own.submit(LONG_PROMPT, max_tokens=2))
        request, after = own.submit(LONG_PROMPT, prompt_logprobs=1, max_tokens=2), own.submit(LONG_PROMPT, max_tokens=2)
        check(own.messages(request), LONG_PROMPT, 1)
        own.tokens(after)
        assert request.num_prefix_hits == 0
        assert after.num_prefix_hits > 0


def test_requests_beside_each_other_get_their_own() -> None:
    """Requests have drafts and log probabilities of output; steps have rows of several prompts."""
    prompts = [LONG_PROMPT[start : start + 20] for start in range(6)]
    with Served(make_target(), max_prefill_rows=30) as own:
        own.connect()
        busy = own.submit([3, 1, 4], max_tokens=40, logprobs=2)
        requests = [own.submit(prompt, prompt_logprobs=2, logprobs=1, max_tokens=6) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            messages = own.messages(request)
            check(messages, prompt, 2)
            assert sum(len(message.logprobs) for message in messages) == 6
        assert len(own.tokens(busy)) == 40


def test_a_preempted_prompt_is_logged_once() -> None:
    """The cache is too small for both requests, so one is preempted."""
    with Served(make_target(), num_blocks=6, max_prefill_rows=5) as own:
        first = own.submit([3, 1, 4], max_tokens=50)
        second = own.submit(LONG_PROMPT[:30], prompt_logprobs=2, max_tokens=20)
        check(own.messages(second), LONG_PROMPT[:30], 2)
        assert len(own.tokens(first)) == 50
        assert first.num_preemptions + second.num_preemptions > 0


def test_a_step_has_no_more_rows_with_logits_than_drafts_need() -> None:
    with Served(make_target(), max_num_seqs=3) as own:
        request = own.submit(LONG_PROMPT, prompt_logprobs=0, max_tokens=1)
        messages = own.messages(request)
        counts = [len(message.prompt_logprobs) for message in messages if message.prompt_logprobs]
    most = 3 * (K + 1)
    assert max(counts) == most - 2  # one is left for each other request
    assert sum(counts) == len(LONG_PROMPT) - 1


@play
async def test_tokens_and_texts_come_with_them(tmp_path: Path) -> None:
    params = build_sampling_params(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    made = ids_request([3, 1, 4, 15], params)
    made.n = 2
    async with served(codec_of(word_tokenizer(added=["<s>"]), tmp_path)) as stub:
        messages = await messages_of(stub, made)
    entries = [entry for message in messages for entry in message.prompt_logprobs]
    assert {message.index for message in messages if message.prompt_logprobs} == {0}
    assert [(entry.token_id, entry.text) for entry in entries] == [(1, " w1"), (4, " w4"), (15, " w15")]
    for message in messages:
        for token_id, entry in zip(message.token_ids, message.logprobs, strict=True):
            assert entry.text == f" w{token_id}"
            assert not entry.HasField("token_id")
            assert list(entry.top_texts) == [f" w{other}" for other in entry.top_ids]
        for entry in message.prompt_logprobs:
            assert list(entry.top_texts) == [f" w{other}" for other in entry.top_ids]


def test_texts_of_tokens_are_those_behind_other_text(tmp_path: Path) -> None:
    codec = codec_of(word_tokenizer(num_words=VOCAB, added=["<s>"]), tmp_path)
    assert codec.token_text(7) == " w7"
    assert codec.token_text(VOCAB) == " <s>"
