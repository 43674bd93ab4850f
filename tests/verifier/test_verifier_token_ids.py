"""Every token id is checked before it enters the engine: of texts, chats, token ids, bias and stop tokens."""

from __future__ import annotations

import grpc
import pytest
from odd_tokenizers import GREEDY, PANICKING, answers, chat_request, codec_of, ids_request, text_request, word_tokenizer
from tiny_targets import VOCAB
from tokenizers import models

from draftwire.v1 import config_pb2
from verifier_service.core.tokenizer import TextCodec, warn_of_ids_beyond

INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
OTHERS = [ids_request([3, 1, 4, i]) for i in range(6)]


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> TextCodec:
    """A tokenizer with a token that was added after the target's embeddings were made."""
    return codec_of(word_tokenizer(added=["<pad>"]), tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return [answer.token_ids for answer in answers(None, OTHERS)]


def check_others(got, alone):
    """The requests beside the bad ones end as they do alone."""
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
