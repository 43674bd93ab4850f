"""Tokenizers that do not fit their target: with added and missing tokens, and with components that raise errors."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc
from odd_tokenizers import CHAT, PANICKING, Answer, chat_request, ids_request, text_request
from tiny_targets import VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb

DECODERS: tuple[Any, ...] = (
    *(None, None, None, PANICKING, decoders.ByteLevel(), decoders.Metaspace(), decoders.WordPiece(), decoders.Fuse()),
    *(decoders.CTC(), decoders.BPEDecoder(), decoders.ByteFallback(), decoders.Strip("w", 2, 2)),
    decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
)
TEMPLATES = (
    *(CHAT, CHAT, None, "", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].role.x }}"),
    *("<extra0>", "{{ messages[0].content }}<extra1>", "{{ 'w1 ' * 500 }}", "{{ messages }}"),
)
TEXTS = ("", " ", "w1", "w2 w3 w4", "x", "never seen", "<extra0>", "w1 <extra1> w2", "w19 w20 w21", "w1" * 70, "é\0🙂")


def odd_tokenizer(rng: Random) -> Tokenizer:
    """Return a tokenizer whose last id may be below, equal to or above the target's last id."""
    count, first = rng.choice((1, 5, VOCAB, VOCAB + 3)), rng.choice((0, 0, 0, 3))
    words = [rng.choice((f"w{i}", f"w{i}", "x" * (i + 1), f"▁{i}", f"<0x{i:02X}>")) for i in range(count)]
    ids = {word: first + i for i, word in enumerate(words)}
    unknown = rng.choice((next(iter(ids)), None))
    tokenizer = Tokenizer(_model(rng, ids, unknown))
    if rng.random() < 0.8:
        tokenizer.pre_tokenizer = rng.choice((pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()))
    if rng.random() < 0.2:
        tokenizer.normalizer = rng.choice((normalizers.NFKC(), normalizers.Replace("w", ""), normalizers.Lowercase()))
    extra = [AddedToken(f"<extra{i}>", special=rng.random() < 0.5) for i in range(rng.choice((0, 1, 2, 40)))]
    tokenizer.add_tokens(extra)
    if extra and rng.random() < 0.3:
        pair = (extra[-1].content, tokenizer.token_to_id(extra[-1].content))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{pair[0]} $A", special_tokens=[pair])
    decoder = rng.choice(DECODERS)
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def _model(rng: Random, ids: dict[str, int], unknown: str | None) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return models.WordLevel(ids, unk_token=unknown or "no such token")
    if kind == 1:
        return models.BPE(ids, [], unk_token=unknown, byte_fallback=rng.random() < 0.5)
    if kind == 2:
        return models.WordPiece(ids, unk_token=unknown or "no such token")
    return models.Unigram([(word, -1.0) for word in ids], None if unknown is None else 0, rng.random() < 0.5)


def odd_request(rng: Random) -> pb.GenerateRequest:
    """Return a request with a text, a chat or token ids, possibly with a logit bias and stop conditions."""
    params = config_pb2.SamplingParams(temperature=0, max_tokens=rng.choice((1, 6)))
    if rng.random() < 0.5:
        params.logit_bias[rng.choice((0, 3, VOCAB - 1, VOCAB))] = 100.0
    if rng.random() < 0.3:
        params.min_tokens = 1
        params.stop_token_ids.append(rng.choice((0, VOCAB - 1, VOCAB, VOCAB + 1)))
    if rng.random() < 0.3:
        params.stop.append(rng.choice(("w", "x", "never")))
    if rng.random() < 0.2:
        return ids_request([rng.choice((0, 5, VOCAB - 1, VOCAB)) for _ in range(3)], params)
    return rng.choice((text_request, chat_request))(rng.choice(TEXTS), params)


def is_proper(answer: Answer) -> bool:
    """Return whether an answer is an output, a refusal that names a field, or an error that the output has no text."""
    if answer.code == grpc.StatusCode.INVALID_ARGUMENT:
        return " = " in answer.details and ": " in answer.details
    if answer.code == grpc.StatusCode.INTERNAL:
        return answer.details.startswith("the output cannot be decoded: the target's tokenizer cannot decode ")
    return answer.code == grpc.StatusCode.OK and max(answer.token_ids) < VOCAB
