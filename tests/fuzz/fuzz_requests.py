"""Requests of clients with values at and beyond the limits."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from models import CONTEXT, SENTENCES, VOCAB_SIZE

NAN, INF = float("nan"), float("inf")
FLOATS = (0.0, -0.0, 1e-45, 1e-38, 1e-7, 1e-3, 0.5, 1.0, 1.0000001, 2.0, 2.0000002, 100.0, 101.0, 1e30, 3.4e38, -1e-45)
FLOATS += (-1.0, -2.0, -2.1, -100.0, -3.4e38, NAN, INF, -INF)
INTEGERS = (0, 1, 2, 5, 16, 17, 20, 21, VOCAB_SIZE - 1, VOCAB_SIZE, CONTEXT - 1, CONTEXT, 2**31 - 1, 2**31, 2**32 - 1)
SIGNED = (0, 1, -1, 1_000_000, 1_000_001, -1_000_000, 2**31 - 1, -(2**31))
SEEDS = (0, 1, -1, 2**62, 2**63 - 1, -(2**63))
TEXTS = ("", " ", "a", "\0", "é" * 512, "x" * 1024, "x" * 1025, "\u202e", "😀" * 40, SENTENCES[0], "<eos>")
TEXTS += ("{{ 7 * 7 }}", "%s%n")
DEEP = '{"a":' * 8000 + "1" + "}" * 8000
OBJECTS = ("", "{", "{}", "[]", "null", DEEP, '{"a": ' + "9" * 5000 + "}", "{}" * 40_000)
OBJECTS += ('{"a": NaN}', '{"a": 1, "a": 2}')
OBJECTS += ('{"enable_thinking": false}', '{"messages": []}', '{"chat_template": "{{ 7 * 7 }}"}', '{"range": 1e308}')
OBJECTS += ('{"function": {"name": "f", "arguments": "{"}}', '{"function": {"arguments": "{}"}}')
OBJECTS += ('{"\\ud800": "\\ud800"}',)
GRAMMARS = {
    "json_schema": ('{"type": "poem"}', '{"$ref": "#"}', '{"type": "array", "minItems": 1e9}', '{"enum": ["\\ud800"]}'),
    "regex": ("a(", "(?=a)", "[^\\s\\S]", "(a{0,1000}){0,1000}", "(" * 30_000, "a\n", "x" * 65_537),
    "grammar": ("start: start", "root ::= root", "root ::= " + "(" * 9000, "start: " + "(" * 9000, "%llguidance {"),
    "structural_tag": (
        '{"structures": [{"begin": "\\ud800", "schema": {}, "end": ""}], "triggers": [""]}',
        '{"format": {"type": "regex", "pattern": "\\ud800"}}',
        '{"format": ' + '{"type": "sequence", "elements": [' * 200 + "]}" * 200 + "}",
        '{"format": {"type": "tag", "begin": 1}}',
    ),
}
ROLES = ("", "user", "system", "assistant", "tool", "r" * 64, "r" * 65, "\n", "{% raw %}", "🙂")


def short_request(rng: Random) -> pb.GenerateRequest:
    """Return a valid request that ends soon."""
    prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 20)))]
    params = config_pb2.SamplingParams(max_tokens=rng.choice((1, 2, 4)), temperature=rng.choice((0.0, 0.7, 1.0)))
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)


def hostile_request(rng: Random) -> pb.GenerateRequest:
    """Return a request whose prompt, sampling parameters or options may have any values that protobuf can carry."""
    request = short_request(rng)
    if rng.random() < 0.4:
        _set_prompt(rng, request)
    for field in rng.sample(list(config_pb2.SamplingParams.DESCRIPTOR.fields), rng.choice((0, 1, 1, 2, 5))):
        _set_parameter(rng, request.sampling_params, field)
    if rng.random() < 0.1:
        request.num_speculative_tokens = rng.choice(INTEGERS)
    if rng.random() < 0.1:
        request.request_id = rng.choice(TEXTS)[:200]
    if rng.random() < 0.1:
        request.truncate_prompt_tokens = rng.choice(INTEGERS)
    if rng.random() < 0.1:
        request.priority = rng.choice(SIGNED)
    if rng.random() < 0.1:
        request.n = rng.choice((*INTEGERS, 3, 128, 129))
    if rng.random() < 0.1:
        request.cache_salt = rng.choice(TEXTS)[:200]
    return request


def _set_prompt(rng: Random, request: pb.GenerateRequest) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        request.ClearField("token_ids")
    elif kind == 1:
        request.token_ids.ids[:] = [rng.choice(INTEGERS) for _ in range(rng.randrange(4))]
    elif kind == 2:
        request.token_ids.ids[:] = [5] * rng.choice((CONTEXT - 1, CONTEXT, CONTEXT + 1, 20_000))
    elif kind == 3:
        request.text = rng.choice(TEXTS)
    elif kind == 4:
        request.text = rng.choice(TEXTS[1:]) * rng.choice((1, CONTEXT // 2, CONTEXT * 8))
    elif kind == 5:
        request.chat.SetInParent()
    else:
        count = rng.choice((1, 1, 2, 3, 50, 2000))
        for _ in range(count):
            request.chat.messages.add(role=rng.choice(ROLES), content=rng.choice(TEXTS))
        if rng.random() < 0.5:
            _set_chat_options(rng, request.chat)


def _set_chat_options(rng: Random, chat: pb.Chat) -> None:
    if rng.random() < 0.5:
        chat.continue_final_message = rng.random() < 0.5
    if rng.random() < 0.5:
        chat.template_arguments = rng.choice(OBJECTS)
    if rng.random() < 0.3:
        chat.tools.extend(rng.choice(OBJECTS) for _ in range(rng.choice((1, 2, 128, 129))))
    message = rng.choice(chat.messages)
    if rng.random() < 0.3:
        message.tool_calls.extend(rng.choice(OBJECTS) for _ in range(rng.choice((1, 2, 129))))
    for field in ("name", "tool_call_id", "reasoning"):
        if rng.random() < 0.2:
            setattr(message, field, rng.choice(TEXTS))


def _set_parameter(rng: Random, params: config_pb2.SamplingParams, field: Any) -> None:
    name = field.name
    if name == "logit_bias":
        for _ in range(rng.choice((1, 3, 1024, 1025))):
            params.logit_bias[rng.choice((*range(VOCAB_SIZE), *INTEGERS, rng.getrandbits(32)))] = rng.choice(FLOATS)
    elif name == "allowed_token_ids":
        few = [rng.choice(INTEGERS) for _ in range(rng.choice((1, 3)))]
        params.allowed_token_ids.extend(few if rng.random() < 0.5 else range(rng.choice((VOCAB_SIZE, 262_145))))
    elif name == "bad_words":
        params.bad_words.extend(rng.choice(TEXTS) for _ in range(rng.choice((1, 3, 64, 65))))
    elif name == "bad_word_ids":
        for _ in range(rng.choice((1, 3, 128, 129))):
            length = rng.choice((0, 1, 1, 2, 16, 17))
            params.bad_word_ids.add(ids=[rng.choice((*range(VOCAB_SIZE), *INTEGERS)) for _ in range(length)])
    elif name == "structured_output":
        _set_structured_output(rng, params.structured_output)
    elif name == "seed":
        params.seed = rng.choice(SEEDS)
    else:
        set_common_parameter(rng, params, field)


def set_common_parameter(rng: Random, params: Any, field: Any) -> None:
    """Set a parameter that `draftwire.v1` and `vllm.grpc.engine` both have: stop texts, stop ids, or one number."""
    name = field.name
    if name == "stop":
        params.stop.extend(rng.choice(TEXTS) for _ in range(rng.choice((1, 3, 16, 17, 1000))))
    elif name == "stop_token_ids":
        params.stop_token_ids.extend(rng.choice(INTEGERS) for _ in range(rng.choice((1, 3, 128, 129, 10_000))))
    elif field.type == FieldDescriptor.TYPE_BOOL:
        setattr(params, name, rng.random() < 0.5)
    elif field.type == FieldDescriptor.TYPE_FLOAT:
        setattr(params, name, rng.choice((*FLOATS, struct.unpack("<f", rng.randbytes(4))[0])))
    elif field.type == FieldDescriptor.TYPE_INT32:
        setattr(params, name, rng.choice(SIGNED))
    else:
        setattr(params, name, rng.choice((*INTEGERS, rng.getrandbits(32))))


def _set_structured_output(rng: Random, output: config_pb2.StructuredOutput) -> None:
    kind = rng.choice(("", "json_object", "choice", *GRAMMARS))
    if kind == "":
        output.SetInParent()
    elif kind == "json_object":
        output.json_object = rng.random() < 0.5
    elif kind == "choice":
        output.choice.values.extend(rng.choice(TEXTS) for _ in range(rng.choice((0, 1, 3, 1025))))
    else:
        setattr(output, kind, rng.choice((*GRAMMARS[kind], *OBJECTS, *TEXTS)))


def seeds() -> list[bytes]:
    """Return valid messages as seeds of mutations; together they have every field of GenerateRequest."""
    params = config_pb2.SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={5: 1.0, 6: -1.0}, seed=7, max_tokens=3, min_tokens=1, stop=["end", "é"],
        stop_token_ids=[9], ignore_eos=True, logprobs=3, allowed_token_ids=range(VOCAB_SIZE), bad_words=["door"],
        bad_word_ids=[config_pb2.TokenSequence(ids=[5, 6])], skip_special_tokens=False, include_stop_text=True,
        prompt_logprobs=2, structured_output=config_pb2.StructuredOutput(regex="[a-z ]*"),
    )  # fmt: skip
    few = config_pb2.SamplingParams(max_tokens=2, temperature=0)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Who painted the door?")])
    asked = pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="Who?", name="Ann"),
            pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=['{"function": {"arguments": "{}"}}']),
            pb.ChatMessage(role="tool", content="Bob", tool_call_id="c1"),
            pb.ChatMessage(role="assistant", content="It was"),
        ],
        continue_final_message=True, template_arguments='{"enable_thinking": false}', tools=['{"type": "function"}'],
    )  # fmt: skip
    return [
        request.SerializeToString()
        for request in (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling_params=params, request_id="seed"),
            pb.GenerateRequest(text="The river bends", sampling_params=few, num_speculative_tokens=2),
            pb.GenerateRequest(chat=chat, sampling_params=few),
            pb.GenerateRequest(chat=asked, sampling_params=few, truncate_prompt_tokens=9, priority=0, cache_salt="s"),
            pb.GenerateRequest(text="Who?", sampling_params=few, n=2),
        )
    ]
