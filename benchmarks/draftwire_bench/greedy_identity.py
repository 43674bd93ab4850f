"""Compares greedy output of both services with drafts to transformers' output, token by token on the same device.

    python -m draftwire_bench.greedy_identity --verifier-device cuda:0 --drafter-device cuda:1
    python -m draftwire_bench.greedy_identity --verifier-device cuda:0 --drafter-device cuda:1 --dtype bfloat16
    python -m draftwire_bench.greedy_identity --target models/smollm2/target --head models/smollm2/dspark \\
        --chat training/chat_prompts.txt

Requests of different lengths start and end while others run. Then a second pair of services runs, whose verifier has a
KV cache for only two requests of full length: many requests start together, of which some share a long prefix, and run
a second time when all have ended. Of these, requests must have been preempted, and prefixes found in the cache.

In float32 all outputs must be identical. In bfloat16 they may diverge if the two best logits are nearly equal:
verifying several rows and decoding one row are matrix products of different shapes, which round differently. At the
first different token, the gap is the difference between transformers' best logit and its logit of the services' token,
in units of the best logit's last bfloat16 digit (ulp). Later tokens continue a different text and are only counted. The
exit code is 1 if a gap is larger than allowed, or nothing was preempted, or no prefix was found. `draftwire bench
serve` measures throughput.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from draftwire import AsyncClient, Client, Completion
from draftwire_bench.environment import DEMO, ROOT, describe
from draftwire_bench.output import json_option, make_table, report_console, write_json
from draftwire_bench.services import PairOptions, running_pair, wait_for_drafters

# Text that is not in the demo pair's training data.
SOURCES = sorted(path for folder in ("draftwire", "verifier_service") for path in (ROOT / folder).glob("*.py"))
PROMPT_LENGTHS = (1, 7, 40, 130, 400)
# Requests for the small cache: tokens of a prefix, number of prompts that share a prefix, most tokens after a prefix.
PREFIX_TOKENS, NUM_SHARING, MAX_ENDING_TOKENS = 128, 4, 40
# Default of the largest allowed gap in ulps.
GAPS = {"float32": 0.0, "bfloat16": 4.0}
BFLOAT16_DIGITS = 8


@dataclass(frozen=True)
class Requests:
    """Prompts and the number of output tokens of each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def max_model_len(self) -> int:
        """Return the positions of the longest request."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))


@dataclass(frozen=True)
class Reference:
    """transformers' output for a prompt."""

    tokens: list[int]
    logits: torch.Tensor  # float32 [tokens, V]


@dataclass(frozen=True)
class Parting:
    """The first token of an output that differs from transformers'; gaps to the best logit in ulps of bfloat16."""

    request: int
    place: int  # in the output
    token: int
    reference_token: int
    gap: float
    second_gap: float  # of transformers' second choice


@dataclass(frozen=True)
class Comparison:
    """Outputs compared to transformers', and statistics of the requests."""

    requests: int
    identical: int
    tokens: int
    tokens_that_differ: int
    drafted: int
    accepted: int
    preemptions: int
    prefix_hit_tokens: int
    partings: list[Parting]


@click.command()
@click.option("--target", default=str(DEMO / "target"), show_default=True, metavar="DIR")
@click.option("--head", default=str(DEMO / "eagle3"), show_default=True, metavar="DIR")
@click.option("--verifier-device", default="cpu", show_default=True)
@click.option("--drafter-device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(list(GAPS)), help="Of all three.")
@click.option("--requests", "count", default=16, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=128, show_default=True, help="Maximum number of tokens of an output.")
@click.option(
    "--chat",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chats instead of source code: a file with one user message per line.",
)
@click.option("--gap", "allowed", type=click.FloatRange(0), help="Largest gap in ulps.  [default: 0; bfloat16: 4]")
@json_option
def main(
    target: str,
    head: str,
    verifier_device: str,
    drafter_device: str,
    dtype: str,
    count: int,
    output_tokens: int,
    chat: Path | None,
    allowed: float | None,
    json_path: Path | None,
) -> None:
    """Compare the outputs and print where they differ."""
    rng = random.Random(1)
    texts = _texts(target)
    prompts = _prompts(texts, count, rng) if chat is None else _chat_prompts(target, chat, count)
    usual = Requests(prompts, [rng.randrange(output_tokens // 4, output_tokens) for _ in prompts])
    sharing = Requests(_sharing_prompts(texts, count, rng), [output_tokens] * count)
    kv_cache_tokens = 2 * sharing.max_model_len
    pair = PairOptions(target, head, verifier_device, drafter_device, dtype=dtype)
    sizes = ("--max-model-len", str(sharing.max_model_len), "--kv-cache-tokens", str(kv_cache_tokens))
    completions = _complete(pair, [usual], within_s=0.5)
    completions_of_small = _complete(replace(pair, verifier_arguments=sizes), [sharing, sharing], within_s=0.0)
    model = _load_reference(target, verifier_device, getattr(torch, dtype))
    result = compare(completions, _references(model, usual))
    small = compare(completions_of_small, 2 * _references(model, sharing))
    allowed = GAPS[dtype] if allowed is None else allowed
    _print(f"greedy output in {dtype}", result, allowed)
    _print(f"greedy output in {dtype} with a KV cache of {kv_cache_tokens} tokens", small, allowed)
    devices = {"verifier_device": verifier_device, "drafter_device": drafter_device, "dtype": dtype}
    of_small = {"kv_cache_tokens": kv_cache_tokens, **asdict(small)}
    document = {**describe(), **devices, "allowed_gap_ulps": allowed, **asdict(result), "small_cache": of_small}
    write_json(json_path, document)
    if failures := find_failures(result, small, allowed):
        raise click.ClickException("\n".join(failures))


def _texts(target: str) -> list[list[int]]:
    """Return source files of this repository as tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    return [tokenizer(path.read_text()).input_ids for path in SOURCES if path.stat().st_size > 2000]


def _prompts(texts: list[list[int]], count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of different lengths from the beginnings of texts."""
    return [texts[i % len(texts)][: rng.choice(PROMPT_LENGTHS)] for i in range(count)]


def _chat_prompts(target: str, messages: Path, count: int) -> list[list[int]]:
    """Return chats with one user message each, in the target's chat template."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": line}] for line in messages.read_text().splitlines() if line][:count]
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in chats]


def _sharing_prompts(texts: list[list[int]], count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts that begin with shared prefixes of texts and end with pieces of other texts."""
    prompts = []
    for i in range(count):
        prefix, other = texts[i // NUM_SHARING % len(texts)], texts[-1 - i % len(texts)]
        end = PREFIX_TOKENS + rng.randint(1, MAX_ENDING_TOKENS)
        prompts.append(prefix[:PREFIX_TOKENS] + other[PREFIX_TOKENS:end])
    return prompts


def _complete(pair: PairOptions, rounds: Sequence[Requests], within_s: float) -> list[Completion]:
    """Return the outputs of the pair's services for each round, whose requests start within `within_s` seconds."""
    with running_pair(pair, "{}") as address:
        with Client(address) as client:
            wait_for_drafters(client)
        return [one for requests in rounds for one in asyncio.run(_complete_round(address, requests, within_s))]


async def _complete_round(address: str, requests: Requests, within_s: float) -> list[Completion]:
    rng = random.Random(2)
    async with AsyncClient(address) as client:

        async def one(prompt: list[int], length: int) -> Completion:
            await asyncio.sleep(rng.random() * within_s)
            return await client.complete(prompt, temperature=0.0, max_tokens=length)

        return list(await asyncio.gather(*(one(p, n) for p, n in zip(requests.prompts, requests.lengths, strict=True))))


def _load_reference(target: str, device: str, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="eager")
    return model.to(device)


def _references(model: Any, requests: Requests) -> list[Reference]:
    references = []
    for prompt, length in zip(requests.prompts, requests.lengths, strict=True):
        ids = torch.tensor([prompt], device=model.device)
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


def compare(completions: Sequence[Completion], references: Sequence[Reference]) -> Comparison:
    """Compare outputs to their references."""
    pairs = list(zip(completions, references, strict=True))
    found = [find_parting(i, completion.token_ids, reference) for i, (completion, reference) in enumerate(pairs)]
    partings = [parting for parting in found if parting is not None]
    statistics = [completion.statistics for completion in completions]
    return Comparison(
        requests=len(found),
        identical=len(found) - len(partings),
        tokens=sum(len(reference.tokens) for reference in references),
        tokens_that_differ=sum(count_differences(c.token_ids, r.tokens) for c, r in pairs),
        drafted=sum(sum(one.drafted) for one in statistics),
        accepted=sum(sum(one.accepted) for one in statistics),
        preemptions=sum(one.preemptions for one in statistics),
        prefix_hit_tokens=sum(one.prefix_hit_tokens for one in statistics),
        partings=partings,
    )


def find_parting(request: int, tokens: tuple[int, ...], reference: Reference) -> Parting | None:
    """Return the first difference between an output and transformers', if any."""
    for place, (token, expected) in enumerate(zip(tokens, reference.tokens, strict=False)):
        if token != expected:
            logits = reference.logits[place]
            best, second = logits.topk(2).values.tolist()
            ulp = 2.0 ** (math.frexp(best)[1] - BFLOAT16_DIGITS)
            return Parting(request, place, token, expected, (best - float(logits[token])) / ulp, (best - second) / ulp)
    if len(tokens) != len(reference.tokens):
        raise click.ClickException(f"request {request}: {len(tokens)} tokens, {len(reference.tokens)} of transformers")
    return None


def count_differences(tokens: tuple[int, ...], expected: list[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(tokens) - len(expected))


def find_failures(result: Comparison, small: Comparison, allowed: float) -> list[str]:
    """Return the failures; preemptions and prefix hits are required only of the small cache."""
    failures = []
    if any(parting.gap > allowed or not allowed for parting in [*result.partings, *small.partings]):
        failures.append("greedy output differs from transformers' by more than rounding")
    if small.preemptions == 0:
        failures.append("no request was preempted with the small KV cache; use more --requests or --output-tokens")
    if small.prefix_hit_tokens == 0:
        failures.append("no prefix was found in the small KV cache; use more --requests")
    return failures


def _print(what: str, result: Comparison, allowed: float) -> None:
    console = report_console()
    console.print(
        f"{what} identical to transformers': {result.identical} of {result.requests} requests; "
        f"{result.tokens_that_differ} of {result.tokens} tokens differ; "
        f"{result.accepted} of {result.drafted} drafts accepted; "
        f"{result.preemptions} preemptions, {result.prefix_hit_tokens} prefix-hit tokens"
    )
    if not result.partings:
        return
    title = f"first tokens that differ; gaps in ulps, allowed {allowed:g}"
    table = make_table(title, ("request", "place", "token", "transformers'", "gap", "gap of its second"))
    for one in result.partings:
        ids = (one.request, one.place, one.token, one.reference_token)
        table.add_row(*map(str, ids), f"{one.gap:.1f}", f"{one.second_gap:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
