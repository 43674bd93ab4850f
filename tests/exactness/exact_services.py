"""A verifier in this process, which tests can change, and clients that collect samples."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from serving import serving

from draftwire.client import AsyncClient
from draftwire.client.output import Statistics
from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.v1 import generate_pb2
from verifier_service.api.requests import RequestHandler
from verifier_service.core.tokenizer import TextCodec
from verifier_service.engine.engine import EngineLimits
from verifier_service.grammar.vocabulary import load_vocabulary
from verifier_service.host.host import EngineHost
from verifier_service.host.in_process import InProcessEngine
from verifier_service.pacing import Limit
from verifier_service.target.target import Target

T = TypeVar("T")

IN_FLIGHT = 256
START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Sample:
    """Output of one request."""

    tokens: tuple[int, ...]
    step_sizes: tuple[int, ...]  # tokens of each step; the first is the step of the prompt
    accepted: tuple[bool, ...]  # whether each token is an accepted draft
    statistics: Statistics


class Loop:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def serve_verifier(
    target: Target,
    config: dict[str, Any],
    drafters: Sequence[str],
    draft_deadline_s: float | None = None,
    *,
    tokenizer_dir: Path | None = None,
    limit: Limit | None = None,
) -> Iterator[str]:
    """Serve a verifier in this process and yield its address when all drafters are connected.

    By default steps wait for drafts. With a `limit` all drafts are requested, and the limit selects those to verify.
    """
    limits = EngineLimits(
        max_num_seqs=IN_FLIGHT,
        max_queue=1024,
        max_prefill_rows=4096,
        num_blocks=1025,
        draft_deadline_s=draft_deadline_s,
        adaptive_k=None if limit is None else True,
    )
    loop = Loop()

    async def start() -> tuple[AsyncExitStack, str]:
        settings = speculative_config_from_mapping(config)
        words, codec = "this server has no tokenizer", None
        if tokenizer_dir is not None:
            words, codec = load_vocabulary(tokenizer_dir, target.vocab_size), TextCodec(tokenizer_dir)
        host = EngineHost(target, settings, limits, drafters, LOOPBACK, vocabulary=words)
        if limit is not None:
            host.engine.drafting.pin(settings.num_speculative_tokens, limit)
        engine = InProcessEngine(host)
        stack = AsyncExitStack()
        address = await stack.enter_async_context(serving(RequestHandler(engine, codec, settings, lambda: None)))
        return stack, address

    running, address = loop.run(start())
    try:
        wait_for_drafters(address, generate_pb2.DRAFTER_STATE_READY, count=len(drafters))
        yield address
    finally:
        loop.run(running.aclose())
        loop.close()


def wait_for_drafters(
    address: str, *states: generate_pb2.DrafterState, count: int = 1
) -> list[generate_pb2.DrafterStatus]:
    """Wait until a verifier has found `count` drafters and all are in one of `states`; return the drafters."""

    async def wait() -> list[generate_pb2.DrafterStatus]:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with AsyncClient(address) as client:
            while True:
                drafters = list((await client.info()).drafters)
                if len(drafters) >= count and all(drafter.state in states for drafter in drafters):
                    return drafters
                assert time.monotonic() < deadline, drafters
                await asyncio.sleep(0.02)

    return asyncio.run(wait())


def sample(
    address: str, prompt: Sequence[int], seeds: Iterable[int | None], *, at_once: int = IN_FLIGHT, **options: Any
) -> list[Sample]:
    """Send one request for each seed, or None for no seed; return the outputs in order."""
    return sample_prompts(address, [(prompt, seed) for seed in seeds], at_once=at_once, **options)


def sample_prompts(
    address: str, requests: Sequence[tuple[Sequence[int], int | None]], *, at_once: int = IN_FLIGHT, **options: Any
) -> list[Sample]:
    """Send one request for each (prompt, seed); return the outputs in order."""
    samples: list[Any] = [None] * len(requests)

    async def work(client: AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            prompt, seed = requests[number]
            samples[number] = await _request(client, prompt, seed, options)

    async def run() -> None:
        numbers = iter(range(len(requests)))
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work(client, numbers))

    asyncio.run(run())
    return samples


async def _request(client: AsyncClient, prompt: Sequence[int], seed: int | None, options: dict[str, Any]) -> Sample:
    chunks = [chunk async for chunk in client.generate(prompt, seed=seed, **options)]
    statistics = chunks[-1].statistics
    assert statistics is not None
    return Sample(
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(len(chunk.token_ids) for chunk in chunks),
        tuple(flag for chunk in chunks for flag in chunk.drafted),
        statistics,
    )
