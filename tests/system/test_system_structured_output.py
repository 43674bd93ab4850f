"""Structured output of every kind through both services, with the demo pair; drafts never change it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from services import Pair
from waiting import wait_for

from draftwire.client import AsyncClient, Completion
from draftwire.contract.errors import InvalidArgumentError, RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{3,8}@[a-z]{2,6}\.(org|com)"
GRAMMAR = 'root ::= "(" item ("," item)* ")"\nitem ::= [a-z] [a-z0-9]? [a-z0-9]?\n'
ITEM = "[a-z][a-z0-9]{0,2}"
CHOICES = ["yes, it is", "no", "nobody knows"]
EMPTY = {"type": "object", "maxProperties": 0}
TAG = {
    "structures": [{"begin": "<f=add>", "schema": EMPTY, "end": "</f>"}],
    "triggers": ["<f="],
}
CONTENT = {"type": "json_schema", "json_schema": EMPTY}
TAG_AT_ONCE = {"format": {"type": "tag", "begin": "<f=add>", "content": CONTENT, "end": "</f>"}}
SLOW = {"type": "integer", "multipleOf": 9999991}
PROMPT = "def answer():\n    return "


def is_json_of_the_schema(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    return len(value["name"]) <= 12 and 0 <= value["age"] <= 130 and set(value["tags"]) <= {"red", "green"}


KINDS = [
    ({"json_schema": SCHEMA}, is_json_of_the_schema),
    ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    ({"grammar": GRAMMAR}, lambda text: re.fullmatch(rf"\({ITEM}(,{ITEM})*\)", text) is not None),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"structural_tag": TAG}, lambda text: text.count("<f=") == text.count("<f=add>{}</f>")),
    ({"structural_tag": TAG_AT_ONCE}, lambda text: re.fullmatch(r"<f=add>\{\s*\}</f>", text) is not None),
]


def complete(pair: Pair, **options: Any) -> Completion:
    # The penalty ends runs of whitespace, which JSON allows without limit.
    return pair.client.complete(PROMPT, **{"max_tokens": 400, "temperature": 0, "frequency_penalty": 2.0, **options})


@pytest.mark.parametrize(("output", "holds"), KINDS, ids=[next(iter(output)) for output, _ in KINDS])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_text_is_as_asked_for_whatever_is_drafted(output, holds, options, demo):
    drafted = complete(demo, structured_output=output, **options)
    alone = complete(demo, structured_output=output, num_speculative_tokens=0, **options)
    assert drafted.token_ids == alone.token_ids
    assert drafted.text == alone.text
    assert drafted.finish_reason == "stop", drafted.text
    assert holds(drafted.text), drafted.text


def test_an_invalid_schema_is_named_and_changes_nothing_else(demo):
    before = complete(demo)
    with pytest.raises(InvalidArgumentError) as caught:
        complete(demo, structured_output={"json_schema": {"type": "poem"}})
    assert caught.value.field == "sampling_params.structured_output.json_schema"
    assert "Invalid type: poem" in str(caught.value)
    assert complete(demo).token_ids == before.token_ids


def test_a_slow_schema_delays_no_other_request(demo):
    async def run() -> tuple[float, float]:
        async with AsyncClient(demo.verifier.address) as client:
            began = time.monotonic()
            slow = asyncio.create_task(client.complete(PROMPT, structured_output={"json_schema": SLOW}))
            await asyncio.sleep(0.1)
            for output in (None, {"choice": ["a", "b"]}):
                await client.complete(PROMPT, max_tokens=4, structured_output=output)
            others = time.monotonic() - began
            with pytest.raises(InvalidArgumentError, match="takes more than 10 s to compile"):
                await slow
            return others, time.monotonic() - began

    others, slow = asyncio.run(run())
    assert others < slow


def test_a_request_that_leaves_while_it_is_compiled_is_forgotten(demo):
    async def run() -> None:
        async with AsyncClient(demo.verifier.address) as client:
            slow = client.generate(PROMPT, structured_output={"json_schema": {**SLOW, "title": "left"}}, timeout=1.0)
            with pytest.raises(RequestError, match="timeout of 1"):
                [chunk async for chunk in slow]

    asyncio.run(run())
    wait_for(lambda: demo.client.info().requests_waiting == 0, "no request waits")
