"""Tokenizers that do not fit their target, and a verifier in this process that uses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import grpc
from serving import serving
from tiny_targets import VOCAB, tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.v1 import config_pb2, generate_pb2
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api.preparation import DEFAULT_RULES, RequestRules
from verifier_service.api.requests import RequestHandler
from verifier_service.core.tokenizer import TextCodec
from verifier_service.engine.engine import EngineLimits
from verifier_service.host.host import EngineHost
from verifier_service.host.in_process import InProcessEngine
from verifier_service.target.target import Target

END = 1
CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
GREEDY = config_pb2.SamplingParams(temperature=0, max_tokens=6)
# The tokenizers library panics on a token that would be stripped on both sides.
PANICKING = decoders.Strip("x", 1, 1)


class Answer(NamedTuple):
    """How a request ended."""

    code: grpc.StatusCode
    details: str
    token_ids: list[int]
    text: str


@cache
def tiny_target() -> Target:
    """Return a Llama with random weights, 2 layers, 20 tokens and 64 positions."""
    return tiny_llama(2, 16, [END])


def word_tokenizer(num_words: int = VOCAB, unknown: str | None = "w0", added: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with the words w0, w1, .. as tokens 0, 1, .. and special tokens after them."""
    words = {f"w{i}": i for i in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown or "no such token"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    return tokenizer


def codec_of(tokenizer: Tokenizer, directory: Path, chat_template: str | None = CHAT) -> TextCodec:
    """Save the tokenizer to a directory and load it as a verifier does."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return TextCodec(directory)


@asynccontextmanager
async def served(codec: TextCodec | None, rules: RequestRules = DEFAULT_RULES) -> AsyncIterator[GenerationStub]:
    """Serve the tiny target in this process; yield a stub."""
    limits = EngineLimits(max_num_seqs=16, max_queue=64, max_prefill_rows=64, num_blocks=129, draft_deadline_s=None)
    config = speculative_config_from_mapping({})
    host = EngineHost(tiny_target(), config, limits, [], LOOPBACK)
    handler = RequestHandler(InProcessEngine(host), codec, config, lambda: None, rules)
    async with serving(handler) as address, grpc.aio.insecure_channel(address) as channel:
        yield GenerationStub(channel)


def text_request(text: str, params: config_pb2.SamplingParams = GREEDY) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text=text, sampling_params=params)


def chat_request(text: str, params: config_pb2.SamplingParams = GREEDY) -> generate_pb2.GenerateRequest:
    chat = generate_pb2.Chat(messages=[generate_pb2.ChatMessage(role="user", content=text)])
    return generate_pb2.GenerateRequest(chat=chat, sampling_params=params)


def ids_request(token_ids: Sequence[int], params: config_pb2.SamplingParams = GREEDY) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=token_ids), sampling_params=params)


async def ask(stub: GenerationStub, request: generate_pb2.GenerateRequest) -> Answer:
    """Return the answer to a request, also if it is an error."""
    token_ids: list[int] = []
    text = ""
    try:
        async for message in stub.Generate(request, timeout=60):
            token_ids += message.token_ids
            text += message.text
    except grpc.aio.AioRpcError as error:
        return Answer(error.code(), str(error.details()), token_ids, text)
    return Answer(grpc.StatusCode.OK, "", token_ids, text)


def answers(codec: TextCodec | None, requests: Sequence[generate_pb2.GenerateRequest]) -> list[Answer]:
    """Return a verifier's answers to concurrent requests."""

    async def run() -> list[Answer]:
        async with served(codec) as stub:
            return list(await asyncio.gather(*(ask(stub, request) for request in requests)))

    return asyncio.run(run())
