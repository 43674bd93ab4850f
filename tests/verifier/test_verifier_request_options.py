"""Options of a request that the service resolves: truncation of the prompt, bad words as texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from odd_tokenizers import (
    Answer,
    answers,
    ask,
    chat_request,
    codec_of,
    ids_request,
    served,
    text_request,
    word_tokenizer,
)
from tiny_targets import CONTEXT, VOCAB
from tokenizers import models, pre_tokenizers

from draftwire.contract.validation import build_sampling_params
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import config_pb2, generate_pb2
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api.preparation import RequestRules
from verifier_service.core.tokenizer import TextCodec

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LONG = [i % (VOCAB - 2) + 2 for i in range(2 * CONTEXT)]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A token for each word w0, w1, .."""
    return codec_of(word_tokenizer(), tmp_path_factory.mktemp("words"))


def greedy(**options: Any) -> config_pb2.SamplingParams:
    return build_sampling_params(**{"temperature": 0, "max_tokens": 20, **options})


def truncated(request: generate_pb2.GenerateRequest, count: int) -> generate_pb2.GenerateRequest:
    request.truncate_prompt_tokens = count
    return request


def test_a_truncated_prompt_is_its_last_tokens(codec: TextCodec) -> None:
    text = " ".join(f"w{i}" for i in LONG)
    kept = LONG[-9:]
    whole, *cut = answers(
        codec,
        [
            ids_request(kept),
            truncated(ids_request(LONG), 9),
            truncated(text_request(text), 9),
            truncated(chat_request(text), 9),
            truncated(ids_request(kept), 100),
        ],
    )
    assert [answer.details for answer in cut] == [""] * 4
    assert [answer.token_ids for answer in cut] == [whole.token_ids] * 4


@pytest.mark.parametrize("count", [CONTEXT, 2 * CONTEXT])
def test_a_prompt_that_is_too_long_when_cut_is_refused(codec: TextCodec, count: int) -> None:
    (answer,) = answers(codec, [truncated(ids_request(LONG), count)])
    assert (answer.code, answer.details) == (
        INVALID,
        f"prompt = {count} tokens: allowed range [1, {CONTEXT - 1}] tokens: the context has {CONTEXT}",
    )


def test_truncation_to_nothing_is_refused(codec: TextCodec) -> None:
    (answer,) = answers(codec, [truncated(ids_request(LONG), 0)])
    assert answer.details == "truncate_prompt_tokens = 0: allowed range [1, 2147483647]"


def test_bad_words_are_not_in_the_output(codec: TextCodec) -> None:
    (plain,) = answers(codec, [ids_request([3, 1, 4], greedy())])
    words = [f"w{plain.token_ids[0]}", f"w{plain.token_ids[1]} w{plain.token_ids[2]}"]
    by_text, by_ids = answers(
        codec,
        [
            ids_request([3, 1, 4], greedy(bad_words=words)),
            ids_request([3, 1, 4], greedy(bad_word_ids=[plain.token_ids[:1], plain.token_ids[1:3]])),
        ],
    )
    assert by_text.details == ""
    assert by_text == by_ids
    assert plain.token_ids[0] not in by_text.token_ids


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("   ", "allowed length 1 to 16 tokens, got 0"),
        ("w1 " * 17, "allowed length 1 to 16 tokens, got 17"),
    ],
)
def test_bad_words_of_no_or_many_tokens_are_refused(codec: TextCodec, word: str, words: str) -> None:
    (answer,) = answers(codec, [ids_request([3], greedy(bad_words=[word]))])
    assert answer.code == INVALID
    assert answer.details == f"sampling_params.bad_words = {word!r}: {words}"


def test_bad_words_need_a_tokenizer() -> None:
    (answer,) = answers(None, [ids_request([3], greedy(bad_words=["w1"]))])
    assert answer.details == "sampling_params.bad_words = ['w1']: this server has no tokenizer"


def test_a_bad_word_is_forbidden_behind_a_space_too(tmp_path: Path) -> None:
    """Where the space makes as many tokens and another first one, as vLLM does."""
    tokenizer = word_tokenizer()
    tokenizer.model = models.WordLevel({"?": 0, "a": 1, "\u2581a": 2, "\u2581b": 3}, unk_token="?")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    codec = codec_of(tokenizer, tmp_path)
    assert codec.encode_bad_word("a") == codec.encode_bad_word(" a") == [[1], [2]]
    assert codec.encode_bad_word("a b") == [[1, 3], [2, 3]]
    assert codec.encode_bad_word("?") == [[0]]


def test_masks_that_leave_no_token_end_their_request_alone(codec: TextCodec) -> None:
    stuck = greedy(allowed_token_ids=[5, 6], bad_word_ids=[[5, 5], [5, 6], [6, 5], [6, 6]])
    first, other = answers(codec, [ids_request([3], stuck), ids_request([3], greedy())])
    assert first.code == grpc.StatusCode.INTERNAL
    assert "allowed_token_ids and bad words leave no token" in first.details
    assert len(first.token_ids) == 1
    assert other.details == ""


async def prefix_hits(stub: GenerationStub, salts: Sequence[str | None]) -> list[int]:
    """Rows of the same prompt that were found in the cache, for requests one after another."""
    hits = []
    for salt in salts:
        request = ids_request(LONG[: CONTEXT - 10])
        if salt is not None:
            request.cache_salt = salt
        messages = [message async for message in stub.Generate(request, timeout=60)]
        hits.append(messages[-1].statistics.prefix_hit_tokens)
    return hits


def test_prefixes_are_shared_within_one_salt() -> None:
    async def run() -> list[int]:
        async with served(None) as stub:
            return await prefix_hits(stub, [None, "a", "b", None, "a", "b", "c"])

    full = (CONTEXT - 11) // BLOCK_SIZE * BLOCK_SIZE
    assert asyncio.run(run()) == [0, 0, 0, full, full, full, 0]


@pytest.mark.parametrize("salt", ["", "s" * 129])
def test_a_salt_has_a_length(salt: str) -> None:
    request = ids_request([3])
    request.cache_salt = salt
    (answer,) = answers(None, [request])
    assert answer.details.startswith("cache_salt = ")
    assert answer.details.endswith(f"allowed length 1 to 128 bytes, got {len(salt)}")


def test_priorities_need_their_policy() -> None:
    request = ids_request([3])
    request.priority = -1
    (answer,) = answers(None, [request])
    assert answer.details == "priority = -1: allowed: 0, because this server runs without --scheduling-policy priority"

    async def run() -> Answer:
        async with served(None, RequestRules(takes_priorities=True)) as stub:
            return await ask(stub, request)

    assert asyncio.run(run()).details == ""
