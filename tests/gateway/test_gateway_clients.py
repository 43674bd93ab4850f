"""The official OpenAI and Anthropic clients through the gateway: their options reach the verifier."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Fleet

from draftwire_cli.demo_gateway import ASK_WEATHER, SCHEMA, WEATHER

pytestmark = pytest.mark.long

PROMPT = "def quicksort(items):"
CHAT = [{"role": "user", "content": "Write a function that sorts a list."}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url, api_key="none", max_retries=0) as made:
        yield made


def text_of(stream: Any) -> str:
    return "".join(choice.text for chunk in stream for choice in chunk.choices)


def test_the_model_is_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list().data] == ["demo"]


def test_a_completion_is_that_of_the_own_service(client: openai.OpenAI, fleet: Fleet):
    expected = fleet.clients[0].complete(PROMPT, temperature=0.0, max_tokens=48)
    answer = client.completions.create(prompt=PROMPT, max_tokens=48, **GREEDY)
    assert answer.choices[0].text == expected.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.statistics.prompt_tokens, 48)
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_has_the_same_text_and_its_usage_the_drafts(client: openai.OpenAI):
    whole = client.completions.create(prompt=PROMPT, max_tokens=48, **GREEDY)
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=PROMPT, max_tokens=48, stream=True, **usage, **GREEDY))
    assert text_of(chunks) == whole.choices[0].text
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert chunks[-1].usage.completion_tokens == 48


def test_a_chat_streams_the_same_text(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=CHAT, max_tokens=32, **GREEDY)
    stream = client.chat.completions.create(messages=CHAT, max_tokens=32, stream=True, **GREEDY)
    assert "".join(one.choices[0].delta.content or "" for one in stream if one.choices) == (
        whole.choices[0].message.content
    )


def test_log_probabilities_have_the_most_likely_tokens(client: openai.OpenAI):
    asked = {"logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(messages=CHAT, max_tokens=6, **asked, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)


def test_a_stop_text_ends_the_output_before_it(client: openai.OpenAI):
    whole = client.completions.create(prompt=PROMPT, max_tokens=64, **GREEDY).choices[0].text
    stop = whole[20:26]
    answer = client.completions.create(prompt=PROMPT, max_tokens=64, stop=[stop], **GREEDY).choices[0]
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_seed_repeats_the_output(client: openai.OpenAI):
    def ask(seed: int) -> str:
        asked = {"model": "demo", "temperature": 1.0, "seed": seed, "max_tokens": 24}
        return client.completions.create(prompt=PROMPT, **asked).choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_several_outputs_are_those_of_following_seeds(client: openai.OpenAI):
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 1.0, "max_tokens": 12}
    several = client.completions.create(n=2, seed=5, **asked)
    alone = [client.completions.create(seed=seed, **asked).choices[0].text for seed in (5, 6)]
    assert [choice.text for choice in sorted(several.choices, key=lambda one: one.index)] == alone


def test_a_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI):
    asked = {"tools": [WEATHER], "tool_choice": "required", "frequency_penalty": 1}
    (choice,) = client.chat.completions.create(messages=ASK_WEATHER, max_tokens=96, **asked, **GREEDY).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_json_follows_its_schema(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "sort", "strict": True, "schema": SCHEMA}}
    asked = {"messages": CHAT, "max_tokens": 96, "response_format": form, "frequency_penalty": 1}
    answer = json.loads(client.chat.completions.create(**asked, **GREEDY).choices[0].message.content)
    assert answer["name"] in ("quicksort", "mergesort")
    assert isinstance(answer["is_stable"], bool)


def test_a_schema_that_is_none_is_the_client_s_error(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    form = {"type": "json_schema", "json_schema": {"name": "broken", "strict": True, "schema": schema}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=CHAT, response_format=form, max_tokens=8, **GREEDY)


def test_a_wrong_value_is_the_client_s_error(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        client.completions.create(prompt=PROMPT, max_tokens=2, extra_body={"min_tokens": 9}, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(prompt="word " * 3000, max_tokens=2, **GREEDY)


def test_server_sent_events_as_curl_reads_them(fleet: Fleet):
    curl = shutil.which("curl") or pytest.skip("curl is not installed")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True, **GREEDY})
    command = [curl, "-sN", f"{fleet.url}/completions", "-H", "content-type: application/json", "-d", body]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    events = [line.removeprefix("data: ") for line in printed.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])


def test_anthropics_client_is_served_too(fleet: Fleet):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=fleet.gateway.url, api_key="none", max_retries=0) as made:
        message = made.messages.create(model="demo", max_tokens=8, messages=CHAT)  # sampled: no temperature is set
        assert 1 <= message.usage.output_tokens <= 8
        assert message.stop_reason in ("max_tokens", "end_turn")
        with made.messages.stream(model="demo", max_tokens=8, messages=CHAT) as stream:
            assert "".join(stream.text_stream)


def test_the_gateway_has_metrics(fleet: Fleet, client: openai.OpenAI):
    client.completions.create(prompt=PROMPT, max_tokens=2, **GREEDY)
    assert "smg_" in fleet.gateway.metrics()
