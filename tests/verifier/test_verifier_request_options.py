"""Options and prompts of requests: how the service resolves them, and which it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from odd_tokenizers import (
    GREEDY,
    PANICKING,
    answers,
    ask,
    chat_request,
    codec_of,
    ids_request,
    served,
    text_request,
    word_tokenizer,
)
from service_scene import play
from tiny_targets import CONTEXT, VOCAB
from tokenizers import models, pre_tokenizers

from draftwire.contract.validation import build_sampling_params
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import config_pb2, generate_pb2
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api.preparation import RequestRules
from verifier_service.core.tokenizer import TextCodec, warn_of_ids_beyond

INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
LONG = [i % (VOCAB - 2) + 2 for i in range(2 * CONTEXT)]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A tokenizer with one token for each word w0, w1, .."""
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


def with_fields(prompt: Sequence[int] = (3,), **fields: Any) -> generate_pb2.GenerateRequest:
    request = ids_request(prompt)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def too_long(count: int) -> str:
    return f"prompt = {count} tokens: allowed range [1, {CONTEXT - 1}] tokens: the context has {CONTEXT}"


def bad_word(word: str, allowed: str) -> tuple[generate_pb2.GenerateRequest, str]:
    return ids_request([3], greedy(bad_words=[word])), f"sampling_params.bad_words = {word!r}: {allowed}"


@pytest.mark.parametrize(
    ("request_", "details"),
    [
        (with_fields(LONG, truncate_prompt_tokens=CONTEXT), too_long(CONTEXT)),
        (with_fields(LONG, truncate_prompt_tokens=2 * CONTEXT), too_long(2 * CONTEXT)),
        (with_fields(LONG, truncate_prompt_tokens=0), "truncate_prompt_tokens = 0: allowed range [1, 2147483647]"),
        bad_word("   ", "allowed length 1 to 16 tokens, got 0"),
        bad_word("w1 " * 17, "allowed length 1 to 16 tokens, got 17"),
        (with_fields(cache_salt=""), "cache_salt = '': allowed length 1 to 128 bytes, got 0"),
        (with_fields(cache_salt="s" * 129), "allowed length 1 to 128 bytes, got 129"),
        (
            with_fields(priority=-1),
            "priority = -1: allowed: 0, because this server runs without --scheduling-policy priority",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_outside_of_their_range_are_refused(
    codec: TextCodec, request_: generate_pb2.GenerateRequest, details: str
) -> None:
    (answer,) = answers(codec, [request_])
    assert answer.code == INVALID
    assert answer.details.endswith(details)


def test_bad_words_need_a_tokenizer() -> None:
    (answer,) = answers(None, [ids_request([3], greedy(bad_words=["w1"]))])
    assert answer.details == "sampling_params.bad_words = ['w1']: this server has no tokenizer"


def test_a_bad_word_is_forbidden_behind_a_space_too(tmp_path: Path) -> None:
    """As in vLLM, if the space keeps the number of tokens and changes the first token."""
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
    """Return the number of cached rows of one prompt, for successive requests with these salts."""
    hits = []
    for salt in salts:
        request = ids_request(LONG[: CONTEXT - 10])
        if salt is not None:
            request.cache_salt = salt
        messages = [message async for message in stub.Generate(request, timeout=60)]
        hits.append(messages[-1].statistics.prefix_hit_tokens)
    return hits


@play
async def test_prefixes_are_shared_within_one_salt() -> None:
    full = (CONTEXT - 11) // BLOCK_SIZE * BLOCK_SIZE
    async with served(None) as stub:
        hits = await prefix_hits(stub, [None, "a", "b", None, "a", "b", "c"])
    assert hits == [0, 0, 0, full, full, full, 0]


@play
async def test_priorities_are_taken_under_their_policy() -> None:
    async with served(None, RequestRules(takes_priorities=True)) as stub:
        request = ids_request([3])
        request.priority = -1
        assert (await ask(stub, request)).details == ""


OTHERS = [ids_request([3, 1, 4, i]) for i in range(6)]


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> TextCodec:
    """A tokenizer with one token beyond the target's vocabulary."""
    return codec_of(word_tokenizer(added=["<pad>"]), tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return [answer.token_ids for answer in answers(None, OTHERS)]


def check_others(got, alone):
    """Check that the requests beside the bad ones end as they do alone."""
    assert [answer.details for answer in got] == [""] * len(OTHERS)
    assert [answer.token_ids for answer in got] == alone


@pytest.mark.parametrize(("make", "field"), [(text_request, "text"), (chat_request, "chat.messages")])
def test_a_token_without_a_row_fails_its_request_alone(padded, alone, make, field):
    bad = [make(f"w2 <pad> w{i}") for i in range(5)]
    got = answers(padded, [*bad, *OTHERS])
    assert {(answer.code, answer.details) for answer in got[:5]} == {
        (INVALID, f"{field} = the token '<pad>' = {VOCAB}: token ids must be in [0, {VOCAB})")
    }
    check_others(got[5:], alone)


def test_start_tells_of_token_ids_beyond_the_vocabulary(padded, caplog):
    warn_of_ids_beyond(padded, VOCAB)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the token '<pad>' = 20" in caplog.text
    caplog.clear()
    warn_of_ids_beyond(padded, VOCAB + 1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("token_ids.ids", ids_request([1, VOCAB])),
        (
            "sampling_params.stop_token_ids",
            ids_request([1], config_pb2.SamplingParams(min_tokens=4, stop_token_ids=[VOCAB])),
        ),
        ("sampling_params.logit_bias", ids_request([1], config_pb2.SamplingParams(logit_bias={VOCAB: 1.0}))),
    ],
)
def test_ids_of_a_request_must_be_in_the_vocabulary(alone, name, request_):
    first, *others = answers(None, [request_, *OTHERS])
    assert (first.code, first.details) == (INVALID, f"{name} = {VOCAB}: token ids must be in [0, {VOCAB})")
    check_others(others, alone)


@pytest.mark.parametrize(("make", "field"), [(text_request, "text"), (chat_request, "chat.messages")])
def test_a_tokenizer_that_raises_refuses_the_text(tmp_path, alone, make, field):
    codec = codec_of(word_tokenizer(unknown=None), tmp_path)
    first, *others = answers(codec, [make("w2 never seen"), *OTHERS])
    assert first.code == INVALID
    assert first.details.startswith(f"{field} = 'w2 never seen")
    assert "the target's tokenizer cannot encode it: WordLevel error: Missing [UNK] token" in first.details
    check_others(others, alone)


@pytest.mark.parametrize(("make", "field"), [(text_request, "text"), (chat_request, "chat.messages")])
def test_a_prompt_without_tokens_is_refused(tmp_path, alone, make, field):
    tokenizer = word_tokenizer()
    tokenizer.model = models.BPE({f"w{i}": i for i in range(VOCAB)}, [])  # no token for unknown characters
    first, *others = answers(codec_of(tokenizer, tmp_path), [make("zzz"), *OTHERS])
    assert (first.code, first.details) == (INVALID, f"{field} = no token: at least one token is required")
    check_others(others, alone)


def test_a_decoder_that_panics_fails_its_request_alone(tmp_path, alone):
    tokenizer = word_tokenizer()
    tokenizer.model = models.WordLevel({("x" if i == 5 else f"w{i}"): i for i in range(VOCAB)}, unk_token="w0")
    tokenizer.decoder = PANICKING
    forced = config_pb2.SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 100.0})
    first, *others = answers(codec_of(tokenizer, tmp_path), [ids_request([1], forced), *OTHERS])
    assert first.code == INTERNAL
    assert first.details.startswith("the output cannot be decoded: the target's tokenizer cannot decode the tokens: ")
    # A prompt's last tokens are decoded with its output.
    fails = [5 in (*one.token_ids.ids, *ids) for one, ids in zip(OTHERS, alone, strict=True)]
    assert [answer.code == INTERNAL for answer in others] == fails
    whole = [(answer.details, answer.token_ids) for answer in others if answer.code != INTERNAL]
    assert whole == [("", ids) for has_failed, ids in zip(fails, alone, strict=True) if not has_failed]
    assert whole


def test_tokens_that_the_tokenizer_lacks_have_no_text(tmp_path):
    codec = codec_of(word_tokenizer(num_words=12), tmp_path)
    forced = config_pb2.SamplingParams(temperature=0, max_tokens=3, logit_bias={15: 100.0})
    (answer,) = answers(codec, [text_request("w2", forced)])
    assert (answer.code, answer.token_ids, answer.text) == (grpc.StatusCode.OK, [15] * 3, "")


def test_a_text_with_known_tokens_is_served(padded):
    (answer,) = answers(padded, [text_request("w3 w1 w4 w0", GREEDY)])
    (by_ids,) = answers(padded, [ids_request([3, 1, 4, 0])])
    assert answer == by_ids
