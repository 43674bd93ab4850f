"""Rendering of messages with the chat template, refused messages, and the methods Tokenize and Detokenize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from odd_tokenizers import VOCAB, answers, codec_of, served, word_tokenizer
from service_scene import error_of, play
from tiny_targets import CONTEXT

from draftwire.client.request import build_request
from draftwire.contract.errors import InvalidArgumentError
from draftwire.v1 import generate_pb2 as pb
from models import make_tokenizer
from verifier_service.api.statuses import MAX_TEXT_BYTES
from verifier_service.core.tokenizer import MOST_HELD, TextCodec

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}:{{ call.function.arguments.x }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec_of(make_tokenizer(), tmp_path_factory.mktemp("chat"), TEMPLATE)


def chat(messages: list[Any], **options: Any) -> pb.Chat:
    """Return the conversation as a client sends it."""
    return build_request(messages, options)[0].chat


def rendered(codec: TextCodec, messages: list[Any], **options: Any) -> str:
    return codec.decode_all(codec.encode_chat(chat(messages, **options)))


def test_a_final_assistant_message_gets_a_new_turn_by_default(codec: TextCodec) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello, "}]
    assert rendered(codec, messages) == "<user>Hi;<assistant>Hello, ;<assistant>"
    assert rendered(codec, messages, continue_final_message=False) == rendered(codec, messages)


def test_a_final_assistant_message_is_continued_where_asked(codec: TextCodec) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello, "}]
    assert rendered(codec, messages, continue_final_message=True) == "<user>Hi;<assistant>Hello, "


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": " "}], ids=["user", "empty"])
def test_only_an_assistant_s_text_is_continued(codec: TextCodec, last: dict[str, str]) -> None:
    with pytest.raises(
        InvalidArgumentError, match="continue_final_message = True: allowed only if the last message is"
    ):
        rendered(codec, [USER, last], continue_final_message=True)


def test_the_template_gets_its_arguments(codec: TextCodec) -> None:
    assert rendered(codec, [USER], template_arguments={"enable_thinking": False}).endswith("<assistant>False")


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt", "tokenize"])
def test_arguments_replace_nothing_of_the_rendering(codec: TextCodec, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^chat.template_arguments.{name} = 1: this name is reserved"):
        rendered(codec, [USER], template_arguments={name: 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "is not valid JSON"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1, "a": 2}', "this key is given more than once"),
        ('{"a":' * 9000 + "1" + "}" * 9000, "nests more than 128"),
        ('{"a": ' + "1" * 5000 + "}", "is not valid JSON"),
    ],
    ids=["list", "open", "NaN", "twice", "deep", "long number"],
)
def test_json_that_is_no_object_is_refused(codec: TextCodec, text: str, words: str) -> None:
    for field in ("template_arguments", "tools"):
        wrong = chat([USER])
        if field == "tools":
            wrong.tools.append(text)
        else:
            wrong.template_arguments = text
        with pytest.raises(InvalidArgumentError) as caught:
            codec.encode_chat(wrong)
        assert caught.value.field == f"chat.{field}"
        assert words in str(caught.value)


def test_text_that_is_no_unicode_is_refused(codec: TextCodec) -> None:
    wrong = chat([USER])
    wrong.template_arguments = '{"enable_thinking": "\\ud800"}'
    with pytest.raises(InvalidArgumentError, match="cannot encode it"):
        codec.encode_chat(wrong)


@pytest.mark.parametrize(("said", "sent"), [("x", "x"), ("\N{EURO SIGN}", "\N{EURO SIGN}"), ("\\ud800", "\\ud800")])
def test_an_error_that_quotes_any_text_reaches_the_client(tmp_path: Path, said: str, sent: str) -> None:
    codec = codec_of(word_tokenizer(), tmp_path, "{{ raise_exception(tools[0].name * 20000) }}")
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[f'{{"name": "{said}"}}']))
    (answer,) = answers(codec, [request])
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert MAX_TEXT_BYTES - 3 <= len(answer.details.encode()) <= MAX_TEXT_BYTES
    text = f"chat.messages = [{{'role': 'user', 'content': ''}}]: the chat template refuses it: {20000 * sent}"
    assert text.startswith(answer.details)


def test_tools_keep_the_order_of_their_keys_and_whole_numbers(codec: TextCodec) -> None:
    tool = {"type": "function", "function": {"name": "f", "b": 1, "a": [2, 3.5]}}
    expected = f"[{json.dumps(tool)}]<user>Hi;<assistant>"
    assert rendered(codec, [USER], tools=[tool]) == expected
    assert rendered(codec, [USER], tools=[json.dumps(tool)]) == expected


def test_messages_have_calls_answers_names_and_thoughts(codec: TextCodec) -> None:
    messages = [
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 7}'}}]},
        {"role": "tool", "content": "9", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So", "reasoning": "hm", "tool_calls": []},
    ]
    expected = "<user Ann>Hi;<assistant>!f:7;<tool>9#c1;<assistant>(hm)So;<assistant>"
    assert rendered(codec, messages) == expected
    messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 7}}}]
    assert rendered(codec, messages) == expected


def test_options_of_messages_need_messages() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^chat\.tools = .* allowed only with a prompt of messages"):
        build_request("text", {"tools": [{}]})


@play
async def test_tokenize_returns_what_generate_takes(tmp_path: Path) -> None:
    async with served(codec_of(word_tokenizer(added=["<s>"]), tmp_path)) as stub:
        text = await stub.Tokenize(pb.TokenizeRequest(text="w2 w4"))
        messages = await stub.Tokenize(pb.TokenizeRequest(chat=chat([{"role": "user", "content": "w5 w1"}])))
        too_long = await stub.Tokenize(pb.TokenizeRequest(text=" ".join(["w3"] * CONTEXT)))
        back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[2, 4]))
        nothing = await stub.Detokenize(pb.DetokenizeRequest())
    assert (list(text.token_ids), text.max_model_len) == ([2, 4], CONTEXT)
    assert list(messages.token_ids) == [5, 1]
    assert list(too_long.token_ids) == [3] * CONTEXT  # Generate refuses such a long prompt
    assert (back.text, nothing.text) == ("w2 w4", "")


@play
async def test_detokenize_leaves_special_tokens_out_unless_asked(tmp_path: Path) -> None:
    ids = [3, VOCAB - 1, 4]
    async with served(codec_of(word_tokenizer(num_words=VOCAB - 1, added=["<s>"]), tmp_path)) as stub:
        without = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
        with_special = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
    assert (without.text, with_special.text) == ("w3 w4", "w3 <s> w4")


def test_many_tokens_are_decoded_to_the_same_text(codec: TextCodec) -> None:
    ids = codec.encode("some words ") * 200
    assert len(ids) > MOST_HELD
    assert codec.decode(ids) == codec.decode(ids[: len(ids) // 4]) * 4


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.TokenizeRequest(), "prompt = None: exactly one of text and chat is required"),
        (pb.TokenizeRequest(text=""), "text = '': must not be empty"),
        (pb.TokenizeRequest(chat=pb.Chat()), "chat.messages = []: at least one message is required"),
        (pb.TokenizeRequest(text="w1" * CONTEXT * 9), "tokens: the context has 64"),
        (pb.DetokenizeRequest(token_ids=[VOCAB]), f"token_ids = {VOCAB}: token ids must be in [0, {VOCAB})"),
        (pb.DetokenizeRequest(token_ids=[1] * 65), "token_ids = 65 tokens: allowed range [0, 64] tokens"),
    ],
    ids=str,
)
@play
async def test_what_cannot_be_tokenised_is_refused(tmp_path: Path, request_: Any, words: str) -> None:
    async with served(codec_of(word_tokenizer(), tmp_path)) as stub:
        call = stub.Tokenize if isinstance(request_, pb.TokenizeRequest) else stub.Detokenize
        code, details = await error_of(call(request_))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


@play
async def test_without_a_tokenizer_both_are_refused() -> None:
    async with served(None) as stub:
        tokenize = stub.Tokenize(pb.TokenizeRequest(text="w1"))
        for call in (tokenize, stub.Detokenize(pb.DetokenizeRequest(token_ids=[1]))):
            code, details = await error_of(call)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "this server has no tokenizer" in details
