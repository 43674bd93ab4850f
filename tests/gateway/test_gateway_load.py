"""Many streams, cancelled streams and cached prefixes through the gateway."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
from conftest import Fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_STREAMS = 200
WAIT_S = 60.0


async def stream(client: openai.AsyncOpenAI, prompt: str, max_tokens: int) -> int:
    """Read a stream to its end; return the number of output tokens in its usage."""
    asked = {"model": "demo", "temperature": 0, "stream_options": {"include_usage": True}}
    usage = None
    async for chunk in await client.completions.create(prompt=prompt, max_tokens=max_tokens, stream=True, **asked):
        usage = chunk.usage or usage
    assert usage is not None
    return int(usage.completion_tokens)


def test_two_hundred_streams_at_once_all_end(fleet: Fleet):
    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", timeout=600, max_retries=0) as client:
            prompts = [f"def function_{number}(" for number in range(NUM_STREAMS)]
            return await asyncio.gather(*(stream(client, prompt, 24) for prompt in prompts))

    before = [info.counters.steps for info in fleet.infos()]
    lengths = asyncio.run(run())
    assert len(lengths) == NUM_STREAMS
    assert all(0 < length <= 24 for length in lengths)
    after = [info.counters.steps for info in fleet.infos()]
    assert all(late > early for early, late in zip(before, after, strict=True))  # both verifiers took part
    assert fleet.running() == [0, 0]


def test_streams_that_are_cancelled_free_their_places(fleet: Fleet):
    async def begin(client: openai.AsyncOpenAI, number: int) -> object:
        asked = {"model": "demo", "max_tokens": 1500, "temperature": 1, "stream": True}
        opened = await client.completions.create(prompt=f"import module_{number}\n", **asked)
        await anext(aiter(opened))
        return opened

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", timeout=600, max_retries=0) as client:
            opened = await asyncio.gather(*(begin(client, number) for number in range(16)))
            assert sum(fleet.running()) > 8  # the other streams have sampled an end token
            for one in opened:
                await one.close()

    asyncio.run(run())
    deadline = time.monotonic() + WAIT_S
    while sum(fleet.running()):
        assert time.monotonic() < deadline
    steps = [info.counters.steps for info in fleet.infos()]
    time.sleep(1)
    assert [info.counters.steps for info in fleet.infos()] == steps  # no steps for the cancelled streams


def test_a_conversation_finds_its_prefix_again(fleet: Fleet):
    """Each prompt begins with all earlier turns, which the chosen verifier has in its prefix cache."""
    turns, conversations = 5, 8
    with openai.OpenAI(base_url=fleet.url, api_key="none", max_retries=0) as client:
        texts = {number: f"# Conversation {number}\n" + f"value_{number} = {number}\n" * 12 for number in range(8)}
        cached = prompt_tokens = 0
        for turn in range(turns):
            for number in range(conversations):
                asked = {"model": "demo", "max_tokens": 24, "temperature": 0}
                answer = client.completions.create(prompt=texts[number], **asked)
                texts[number] += answer.choices[0].text + f"\n# turn {turn}\n"
                if turn:
                    cached += answer.usage.prompt_tokens_details.cached_tokens
                    prompt_tokens += answer.usage.prompt_tokens
    share = cached / prompt_tokens
    print(f"{share:.3f} of the prompts' tokens after the first turn were in the cache of the verifier that was chosen")
    assert share > 0.8
