"""The cost of the gateway smg: the same load through smg and directly with gRPC.

    python -m draftwire_bench.gateway --server 127.0.0.1:50051 --requests 64

measures a running verifier. All prompts have one length and different beginnings, so the prefix cache has no hits.
Outputs have exactly `--max-tokens` tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import click

from draftwire.client import AsyncClient
from draftwire_bench.environment import describe
from draftwire_bench.gateway_process import GatewayProcess
from draftwire_bench.output import json_option, write_json
from draftwire_bench.serve.metrics import percentiles

WORDS = ("the", "verifier", "keeps", "what", "the", "target", "says", "and", "the", "drafter", "guesses")
NUMBERS = count()


@dataclass(frozen=True)
class Load:
    """The load that is measured with and without the gateway."""

    requests: int  # concurrent
    rounds: int  # consecutive requests of each client
    prompt_words: int
    max_tokens: int

    def prompt(self) -> str:
        """Return a text with a unique beginning."""
        return f"{next(NUMBERS)} " + " ".join(WORDS[n % len(WORDS)] for n in range(self.prompt_words))


# Serves one prompt; returns the number of output tokens and when the first arrived, by time.perf_counter().
Ask = Callable[[str], Awaitable[tuple[int, float]]]


async def run_load(load: Load, ask: Ask) -> dict[str, float]:
    """Run `load.requests` clients with `load.rounds` consecutive requests each.

    Return tokens per second, and the median and the 99th percentile of the time to the first token.
    """
    firsts: list[float] = []

    async def run_client() -> int:
        tokens = 0
        for _ in range(load.rounds):
            began = time.perf_counter()
            given, first = await ask(load.prompt())
            tokens += given
            firsts.append(first - began)
        return tokens

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(run_client() for _ in range(load.requests))))
    total_s, first_token = time.perf_counter() - began, percentiles(firsts)
    assert first_token is not None
    return {"tokens_per_s": tokens / total_s, "ttft_p50_s": first_token.p50, "ttft_p99_s": first_token.p99}


async def directly(server: str, load: Load) -> dict[str, float]:
    """Measure the verifier's service."""
    async with AsyncClient(server) as client:

        async def ask(prompt: str) -> tuple[int, float]:
            tokens, first = 0, 0.0
            async for chunk in client.generate(prompt, max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True):
                first = first or time.perf_counter()
                tokens += len(chunk.token_ids)
            return tokens, first

        return await run_load(load, ask)


async def through_gateway(gateway: GatewayProcess, load: Load) -> dict[str, float]:
    """Measure smg's HTTP service with OpenAI's client."""
    from openai import AsyncOpenAI

    model = gateway.model()
    async with AsyncOpenAI(base_url=gateway.api_url, api_key="none", max_retries=0, timeout=600) as client:
        completions: Any = client.completions

        async def ask(prompt: str) -> tuple[int, float]:
            tokens, first = 0, 0.0
            async for chunk in await completions.create(
                model=model,
                prompt=prompt,
                max_tokens=load.max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            ):
                first = first or time.perf_counter()
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return tokens, first

        return await run_load(load, ask)


async def measure(server: str, load: Load, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Measure both alternately, after a warm-up round of each."""
    with GatewayProcess([server], "--log-level", "warn") as gateway:
        once = Load(load.requests, 1, load.prompt_words, load.max_tokens)
        await directly(server, once)
        await through_gateway(gateway, once)
        runs: dict[str, list[dict[str, float]]] = {"direct": [], "gateway": []}
        for _ in range(repeats):
            runs["direct"].append(await directly(server, load))
            runs["gateway"].append(await through_gateway(gateway, load))
    return runs


@click.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="A running verifier without TLS.")
@click.option("--requests", default=64, show_default=True, type=click.IntRange(1), help="Concurrent requests.")
@click.option("--rounds", default=4, show_default=True, type=click.IntRange(1), help="Requests per client.")
@click.option("--prompt-words", default=256, show_default=True, type=click.IntRange(1), help="Words per prompt.")
@click.option("--max-tokens", default=400, show_default=True, type=click.IntRange(1), help="Tokens per output.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Runs of each, alternately.")
@json_option
def main(
    server: str, requests: int, rounds: int, prompt_words: int, max_tokens: int, repeats: int, json_path: Path | None
) -> None:
    """Measure the same load directly and through smg, and print smg's share of the direct throughput."""
    load = Load(requests, rounds, prompt_words, max_tokens)
    runs = asyncio.run(measure(server, load, repeats))
    best = {way: max(run["tokens_per_s"] for run in found) for way, found in runs.items()}
    share = best["gateway"] / best["direct"]
    for way, found in runs.items():
        for run in found:
            print(way, ", ".join(f"{name} {value:.4g}" for name, value in run.items()))
    print(f"through the gateway: {share:.3f} of the direct throughput")
    write_json(json_path, {**describe(), "load": asdict(load), "runs": runs, "gateway_share": share})


if __name__ == "__main__":
    main()
