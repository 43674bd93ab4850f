"""Greedy output of both services, token for token beside transformers' own on the same device, in float32.

    python benchmarks/greedy_identity.py --verifier-device cuda:0 --drafter-device cuda:1

Requests of different lengths join and leave while others run. Exit code 1 when any output differs. Throughput is
measured by `draftwire bench serve`.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console

from draftwire import AsyncClient, Client, Completion
from draftwire.bench.environment import describe
from draftwire.bench.services import PairOptions, running_pair, wait_for_drafters

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
# Text that the demo pair has never seen.
SOURCES = sorted(path for folder in ("draftwire", "verifier_service") for path in (ROOT / folder).glob("*.py"))
PROMPT_LENGTHS = (1, 7, 40, 130, 400)


@click.command()
@click.option("--target", default=str(DEMO / "target"), show_default=True, metavar="DIR")
@click.option("--head", default=str(DEMO / "head"), show_default=True, metavar="DIR")
@click.option("--verifier-device", default="cpu", show_default=True)
@click.option("--drafter-device", default="cpu", show_default=True)
@click.option("--requests", "count", default=16, show_default=True)
@click.option("--output-tokens", default=128, show_default=True, help="Of the longest.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the result.")
def main(
    target: str,
    head: str,
    verifier_device: str,
    drafter_device: str,
    count: int,
    output_tokens: int,
    json_path: Path | None,
) -> None:
    """Compares the outputs and prints how many are identical."""
    rng = random.Random(1)
    prompts = _prompts(target, count, rng)
    lengths = [rng.randrange(output_tokens // 4, output_tokens) for _ in prompts]
    pair = PairOptions(target, head, verifier_device, drafter_device, dtype="float32")
    with running_pair(pair, "{}") as address:
        with Client(address) as client:
            wait_for_drafters(client)
        completions = asyncio.run(_complete(address, prompts, lengths))
    references = _references(target, verifier_device, prompts, lengths)
    same = [tuple(r) == c.token_ids for r, c in zip(references, completions, strict=True)]
    result = {
        "requests": len(same),
        "identical": sum(same),
        "drafted": sum(sum(c.statistics.drafted) for c in completions),
        "accepted": sum(sum(c.statistics.accepted) for c in completions),
    }
    Console().print(
        f"greedy output identical to transformers': {result['identical']} of {result['requests']} requests; "
        f"{result['accepted']} of {result['drafted']} drafts accepted"
    )
    if json_path is not None:
        document = describe() | {"verifier_device": verifier_device, "drafter_device": drafter_device, **result}
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if not all(same):
        raise click.ClickException("greedy output differs from transformers'")


def _prompts(target: str, count: int, rng: random.Random) -> list[list[int]]:
    """Beginnings of our own source files, of different lengths."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    texts = [path.read_text() for path in SOURCES if path.stat().st_size > 2000]
    longest = max(PROMPT_LENGTHS)
    encoded = [tokenizer(texts[i % len(texts)]).input_ids[:longest] for i in range(count)]
    return [ids[: rng.choice(PROMPT_LENGTHS)] for ids in encoded]


async def _complete(address: str, prompts: list[list[int]], lengths: list[int]) -> list[Completion]:
    rng = random.Random(2)
    async with AsyncClient(address) as client:

        async def one(prompt: list[int], length: int) -> Completion:
            await asyncio.sleep(rng.random() / 2)
            return await client.complete(prompt, temperature=0.0, max_tokens=length)

        return list(await asyncio.gather(*(one(p, n) for p, n in zip(prompts, lengths, strict=True))))


def _references(target: str, device: str, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    model.to(device)
    outputs = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    main()
