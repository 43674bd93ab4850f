"""The cost of structured output: throughput of one pair without and with a JSON Schema, alternately.

    python -m draftwire_bench.structured_output --target benchmarks/shapes/llama-3.1-8b \\
        --head benchmarks/shapes/llama-3.1-8b-eagle3 --load-format dummy --dtype bfloat16 \\
        --verifier-device cuda:0 --drafter-device cuda:0 --concurrency 32 --rounds 2

A target without a tokenizer gets one with pieces of JSON and random words, as many as the target has tokens. Random
weights make drafts that violate most schemas at once. So the default schema is an array of strings, which drafts do not
leave. The acceptance length of synthetic drafts is printed with the throughput.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwire.client.request import Prompt
from draftwire.model.checkpoints import resolve_directory
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.commands.options import pair_from, pair_options
from draftwire_bench.serve.serve import ServeOptions, measure
from draftwire_bench.serve.workload import Level, Shape, random_prompts
from draftwire_bench.services import running_pair
from verifier_service.core.tokenizer import has_tokenizer

# The text after two tokens hardly ends: with random weights any other place of a document soon rejects drafts.
SCHEMA = {"type": "array", "minItems": 100000, "items": {"type": "string"}}
SYNTHETIC = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}'
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
JSON_PIECES = ['{"', '":', '",', '"}', "},", '":"', '","', '"id":', '"text":', '"kind":', "[{", "}]"]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer with the given number of tokens; the last token is special."""
    draw = random.Random(0)
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *JSON_PIECES])
    while len(pieces) < vocab_size - 1:
        word = "".join(draw.choices(LETTERS, range(len(LETTERS), 0, -1), k=draw.randrange(2, 11)))
        pieces[draw.choice(["Ġ", ""]) + word] = None
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)


@contextmanager
def with_tokenizer(target: str) -> Iterator[str]:
    """Yield the target's directory, or a copy with a tokenizer if the directory has none."""
    directory = resolve_directory(target)
    if has_tokenizer(directory):
        yield str(directory)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / directory.name
        shutil.copytree(directory, copy)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        write_tokenizer(copy, config["vocab_size"])
        yield str(copy)


def _prompts(length: int, seed: int, info: pb.GetVerifierInfoResponse) -> Iterator[Prompt]:
    return random_prompts(length, info.vocab_size, seed)


@click.command()
@pair_options
@click.option("--concurrency", default=32, show_default=True, help="Concurrent requests.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of all four measurements.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Tokens per prompt.")
@click.option("--output-tokens", default=400, show_default=True, help="Tokens per output.")
@click.option("--json-schema", type=click.Path(exists=True, path_type=Path), help="File.  [default: an endless array]")
@click.option("--speculative-config", default=SYNTHETIC, show_default=True, help="Option of the verifier.")
def main(json_schema: Path | None, concurrency: int, rounds: int, speculative_config: str, **given: Any) -> None:
    """Print output tokens per second of the steady state with and without a schema, their ratio, and acceptance."""
    schema = SCHEMA if json_schema is None else json.loads(json_schema.read_text(encoding="utf-8"))
    prompt_tokens, output_tokens = given.pop("prompt_tokens"), given.pop("output_tokens")
    pair = pair_from(given)
    with with_tokenizer(pair.target) as target:
        pair = replace(pair, target=target).with_room_for(concurrency)
        with running_pair(pair, speculative_config) as address:
            for number in range(rounds):
                found = []
                samplings: list[dict[str, Any]] = [{}, {"structured_output": {"json_schema": schema}}]
                for sampling in samplings:
                    shape = Shape(output_tokens, 1.0, number, sampling)
                    options = ServeOptions([Level(concurrency=concurrency)], shape, allows_skipped=True)
                    found.append(measure(address, options, partial(_prompts, prompt_tokens, number))[1])
                for free, structured in zip(*found, strict=True):
                    ratio = structured.tokens_per_s / free.tokens_per_s
                    drafting = "on" if free.drafting else "off"
                    click.echo(
                        f"round {number}, drafting {drafting}: {free.tokens_per_s:.0f} tokens/s, "
                        f"with a schema {structured.tokens_per_s:.0f}, ratio {ratio:.3f}; acceptance length "
                        f"{free.acceptance.length or 1:.2f}, with a schema {structured.acceptance.length or 1:.2f}"
                    )


if __name__ == "__main__":
    main()
