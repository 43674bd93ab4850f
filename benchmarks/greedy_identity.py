"""Greedy output of both services, with drafts, token for token beside transformers' own without, on the same device.

    python benchmarks/greedy_identity.py --verifier-device cuda:0 --drafter-device cuda:1
    python benchmarks/greedy_identity.py --verifier-device cuda:0 --drafter-device cuda:1 --dtype bfloat16

Requests of different lengths join and leave while others run. In float32 all outputs must be identical. In bfloat16
they may part where the two best logits are nearly equal: verifying several rows and decoding one are products of
different shapes, which round differently. Where an output parts, the gap is how far transformers' logit of the
services' token lies below its best, in units of that logit's last bfloat16 digit (ulp). What follows continues another
text and is only counted. Exit code 1 when a gap is larger than allowed. Throughput is measured by
`draftwire bench serve`.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from draftwire import AsyncClient, Client, Completion
from draftwire.bench.environment import describe
from draftwire.bench.services import PairOptions, running_pair, wait_for_drafters

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
# Text that the demo pair has never seen.
SOURCES = sorted(path for folder in ("draftwire", "verifier_service") for path in (ROOT / folder).glob("*.py"))
PROMPT_LENGTHS = (1, 7, 40, 130, 400)
# The largest gap that is allowed by default, ulps: none in float32.
GAPS = {"float32": 0.0, "bfloat16": 4.0}
BFLOAT16_DIGITS = 8


@dataclass(frozen=True)
class Reference:
    """What transformers says after a prompt."""

    tokens: list[int]
    logits: torch.Tensor  # float32 [tokens, V]


@dataclass(frozen=True)
class Parting:
    """The first token of an output that is not transformers'; gaps below its best logit, in ulps of bfloat16."""

    request: int
    place: int  # in the output
    token: int
    reference_token: int
    gap: float
    second_gap: float  # of transformers' second choice


@click.command()
@click.option("--target", default=str(DEMO / "target"), show_default=True, metavar="DIR")
@click.option("--head", default=str(DEMO / "head"), show_default=True, metavar="DIR")
@click.option("--verifier-device", default="cpu", show_default=True)
@click.option("--drafter-device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(list(GAPS)), help="Of all three.")
@click.option("--requests", "count", default=16, show_default=True)
@click.option("--output-tokens", default=128, show_default=True, help="Of the longest.")
@click.option("--gap", "allowed", type=click.FloatRange(0), help="Largest allowed, ulps.  [default: 0; bfloat16: 4]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the result.")
def main(
    target: str,
    head: str,
    verifier_device: str,
    drafter_device: str,
    dtype: str,
    count: int,
    output_tokens: int,
    allowed: float | None,
    json_path: Path | None,
) -> None:
    """Compares the outputs and prints where they part."""
    rng = random.Random(1)
    prompts = _prompts(target, count, rng)
    lengths = [rng.randrange(output_tokens // 4, output_tokens) for _ in prompts]
    pair = PairOptions(target, head, verifier_device, drafter_device, dtype=dtype)
    with running_pair(pair, "{}") as address:
        with Client(address) as client:
            wait_for_drafters(client)
        completions = asyncio.run(_complete(address, prompts, lengths))
    references = _references(target, verifier_device, getattr(torch, dtype), prompts, lengths)
    found = [find_parting(i, c.token_ids, r) for i, (c, r) in enumerate(zip(completions, references, strict=True))]
    partings = [parting for parting in found if parting is not None]
    allowed = GAPS[dtype] if allowed is None else allowed
    result = {
        "requests": len(found),
        "identical": len(found) - len(partings),
        "tokens": sum(len(reference.tokens) for reference in references),
        "tokens_that_differ": sum(
            count_differences(c.token_ids, r.tokens) for c, r in zip(completions, references, strict=True)
        ),
        "drafted": sum(sum(c.statistics.drafted) for c in completions),
        "accepted": sum(sum(c.statistics.accepted) for c in completions),
        "allowed_gap_ulps": allowed,
        "partings": [asdict(parting) for parting in partings],
    }
    _print(result, partings, dtype)
    if json_path is not None:
        devices = {"verifier_device": verifier_device, "drafter_device": drafter_device, "dtype": dtype}
        json_path.write_text(json.dumps(describe() | devices | result, indent=1) + "\n")
    if any(parting.gap > allowed or not allowed for parting in partings):
        raise click.ClickException("greedy output differs from transformers' by more than rounding")


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


def _references(
    target: str, device: str, dtype: torch.dtype, prompts: list[list[int]], lengths: list[int]
) -> list[Reference]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="eager")
    model.to(device)
    references = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt], device=device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(output.logits).float().cpu()
        references.append(Reference(output.sequences[0, len(prompt) :].tolist(), logits))
    return references


def find_parting(request: int, tokens: tuple[int, ...], reference: Reference) -> Parting | None:
    """Where an output parts from transformers', if it does."""
    for place, (token, expected) in enumerate(zip(tokens, reference.tokens, strict=False)):
        if token != expected:
            logits = reference.logits[place]
            best, second = logits.topk(2).values.tolist()
            ulp = 2.0 ** (math.frexp(best)[1] - BFLOAT16_DIGITS)
            return Parting(
                request, place, token, expected, (best - float(logits[token])) / ulp, (best - second) / ulp
            )
    if len(tokens) != len(reference.tokens):
        raise click.ClickException(f"request {request}: {len(tokens)} tokens, {len(reference.tokens)} of transformers")
    return None


def count_differences(tokens: tuple[int, ...], expected: list[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(tokens) - len(expected))


def _print(result: dict[str, Any], partings: list[Parting], dtype: str) -> None:
    console = Console()
    console.print(
        f"greedy output in {dtype} identical to transformers': {result['identical']} of {result['requests']} requests; "
        f"{result['tokens_that_differ']} of {result['tokens']} tokens differ; "
        f"{result['accepted']} of {result['drafted']} drafts accepted"
    )
    if not partings:
        return
    title = f"first tokens that differ; gaps in ulps, allowed {result['allowed_gap_ulps']:g}"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("request", "place", "token", "transformers'", "gap", "gap of its second"):
        table.add_column(column, justify="right")
    for one in partings:
        ids = (one.request, one.place, one.token, one.reference_token)
        table.add_row(*map(str, ids), f"{one.gap:.1f}", f"{one.second_gap:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
