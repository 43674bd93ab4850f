"""Log probabilities of prompts: those of a plain forward pass, in pieces, whatever the cache and the batch hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_scene import HIDDEN, NUM_LAYERS, K, Served, make_target, scheduling  # noqa: F401
from odd_tokenizers import codec_of, ids_request, served, word_tokenizer
from tiny_targets import VOCAB, tiny_model

from draftwire.contract.errors import DraftwireError
from draftwire.contract.validation import build_sampling_params
from draftwire.v1 import generate_pb2 as pb
from verifier_service.core.request import Request
from verifier_service.sampling.logprobs import MOST_LIKELIEST
from verifier_service.target.target import Target

PROMPT = [7 * i % 19 + i // 19 % 2 for i in range(45)]


@contextmanager
def running(target: Target, **limits: Any) -> Iterator[Served]:
    own = Served(target, **limits)
    own.engine.start()
    yield own
    own.engine.stop()


def plain_logprobs(prompt: Sequence[int]) -> torch.Tensor:
    """[len(prompt) - 1, VOCAB] of a forward pass of transformers alone."""
    return tiny_model(NUM_LAYERS, HIDDEN, "eager")(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)


def messages_of(own: Served, request: Request) -> list[pb.GenerateResponse]:
    messages = []
    while not messages or messages[-1].finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        message = own.next(request)
        assert not isinstance(message, DraftwireError), message
        messages.append(message)
    return messages


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
    with running(make_target(), max_num_seqs=max_num_seqs, max_prefill_rows=prefill_rows) as own:
        request = own.submit(PROMPT, prompt_logprobs=num_top, max_tokens=4)
        plain = own.submit(PROMPT, max_tokens=4)
        messages = messages_of(own, request)
        check(messages, PROMPT, num_top)
        assert [token for message in messages for token in message.token_ids] == own.tokens(plain)


def test_rows_in_the_cache_are_computed_again() -> None:
    with running(make_target()) as own:
        own.tokens(own.submit(PROMPT, max_tokens=2))
        request, after = own.submit(PROMPT, prompt_logprobs=1, max_tokens=2), own.submit(PROMPT, max_tokens=2)
        check(messages_of(own, request), PROMPT, 1)
        own.tokens(after)
        assert request.num_prefix_hits == 0
        assert after.num_prefix_hits > 0


def test_requests_beside_each_other_get_their_own() -> None:
    """With drafts, log probabilities of output, and rows of several prompts in a step."""
    prompts = [PROMPT[start : start + 20] for start in range(6)]
    with running(make_target(), max_prefill_rows=30) as own:
        own.connect()
        busy = own.submit([3, 1, 4], max_tokens=40, logprobs=2)
        requests = [own.submit(prompt, prompt_logprobs=2, logprobs=1, max_tokens=6) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            messages = messages_of(own, request)
            check(messages, prompt, 2)
            assert sum(len(message.logprobs) for message in messages) == 6
        assert len(own.tokens(busy)) == 40


def test_a_preempted_prompt_is_told_once() -> None:
    """The cache is too small for both, and the second gives its blocks back."""
    with running(make_target(), num_blocks=6, max_prefill_rows=5) as own:
        first = own.submit([3, 1, 4], max_tokens=50)
        second = own.submit(PROMPT[:30], prompt_logprobs=2, max_tokens=20)
        check(messages_of(own, second), PROMPT[:30], 2)
        assert len(own.tokens(first)) == 50
        assert first.num_preemptions + second.num_preemptions > 0


def test_a_step_has_no_more_rows_with_logits_than_drafts_need() -> None:
    with running(make_target(), max_num_seqs=3) as own:
        request = own.submit(PROMPT, prompt_logprobs=0, max_tokens=1)
        messages = messages_of(own, request)
        counts = [len(message.prompt_logprobs) for message in messages if message.prompt_logprobs]
    most = 3 * (K + 1)
    assert max(counts) == most - 2  # one is left for each other request
    assert sum(counts) == len(PROMPT) - 1


def test_tokens_and_texts_come_with_them(tmp_path: Path) -> None:
    codec = codec_of(word_tokenizer(added=["<s>"]), tmp_path)

    async def run() -> list[pb.GenerateResponse]:
        params = build_sampling_params(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
        request = ids_request([3, 1, 4, 15], params)
        request.n = 2
        async with served(codec) as stub:
            return [message async for message in stub.Generate(request, timeout=60)]

    messages = asyncio.run(run())
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
