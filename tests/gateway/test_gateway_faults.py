"""A verifier dies or drains under load: no request through the gateway fails."""

from __future__ import annotations

import asyncio
import signal
import time

import openai
import pytest
from conftest import Fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

WAIT_S = 120.0
NUM_REQUESTS = 24


async def complete(client: openai.AsyncOpenAI, number: int, max_tokens: int) -> int | openai.OpenAIError:
    """Return the number of tokens of a completion, or its error."""
    prompt = f"{number} is a number.\n"  # no common prefix, for which the gateway would choose one verifier for all
    try:
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0)
    except openai.OpenAIError as error:
        return error
    return int(answer.usage.completion_tokens)


async def under_load(fleet: Fleet, number: int) -> list[int | openai.OpenAIError]:
    """Send the signal `number` to one verifier while both compute; return how the requests ended."""
    async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", timeout=300, max_retries=0) as client:
        running: list[asyncio.Future[int | openai.OpenAIError]] = []
        deadline = time.monotonic() + WAIT_S
        while min(await asyncio.to_thread(fleet.running)) < 2:
            assert time.monotonic() < deadline
            if all(one.done() for one in running):  # outputs may end early
                begin = len(running)
                running += [asyncio.ensure_future(complete(client, begin + n, 400)) for n in range(NUM_REQUESTS)]
            await asyncio.sleep(0.05)
        fleet.verifiers[0].send_signal(number)
        ended = await asyncio.gather(*running)
        later = await asyncio.gather(*(complete(client, 10_000 + n, 8) for n in range(8)))
    assert later == 8 * [8]  # the gateway sends no request to the ended verifier
    return ended


def test_a_killed_verifier_costs_no_request_that_can_be_retried(own_fleet: Fleet):
    ended = asyncio.run(under_load(own_fleet, signal.SIGKILL))
    failed = [one for one in ended if isinstance(one, openai.OpenAIError)]
    print(f"{len(failed)} of {len(ended)} requests failed: {failed[:2]}")
    assert not failed


def test_a_draining_verifier_ends_what_it_has(own_fleet: Fleet):
    ended = asyncio.run(under_load(own_fleet, signal.SIGTERM))
    assert [one for one in ended if isinstance(one, openai.OpenAIError)] == []
    assert own_fleet.verifiers[0].wait(WAIT_S) == 0
