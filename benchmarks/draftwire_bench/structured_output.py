"""The cost of structured output: throughput of one pair without and with a JSON Schema, alternately.

    python -m draftwire_bench.structured_output --target benchmarks/shapes/llama-3.1-8b \\
        --head benchmarks/shapes/llama-3.1-8b-eagle3 --load-format dummy --dtype bfloat16 \\
        --verifier-device cuda:0 --drafter-device cuda:0 --concurrency 32 --rounds 2

A target without a tokenizer gets one with pieces of JSON and random words, as many as the target has tokens. Random
weights make drafts that violate most schemas at once. So the default schema is an array of strings, which drafts do not
leave.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from draftwire_bench.environment import describe
from draftwire_bench.output import json_option, make_table, report_console, write_json
from draftwire_bench.serve.metrics import PHASES, step_seconds
from draftwire_bench.serve.report import describe_level
from draftwire_bench.serve.serve import LevelResult, ServeOptions, measure
from draftwire_bench.serve.workload import Level, Shape, random_prompts
from draftwire_bench.services import PairOptions, running_pair
from verifier_service.core.tokenizer import has_tokenizer

# The text after two tokens hardly ends: with random weights any other place of a document soon rejects drafts.
SCHEMA = {"type": "array", "minItems": 100000, "items": {"type": "string"}}
SYNTHETIC = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}'
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
JSON_PIECES = ['{"', '":', '",', '"}', "},", '":"', '","', '"id":', '"text":', '"kind":', "[{", "}]"]


def write_tokenizer(directory: Path, vocab_size: int, end_ids: Collection[int]) -> None:
    """Write a byte-level tokenizer with the given number of tokens; those at `end_ids` are special.

    If an end id were text, strings could contain it, and the verifier would have to correct every mask.
    """
    draw = random.Random(0)
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *JSON_PIECES])
    while len(pieces) < vocab_size:
        if len(pieces) in end_ids:
            pieces[f"<end {len(pieces)}>"] = None
            continue
        word = "".join(draw.choices(LETTERS, range(len(LETTERS), 0, -1), k=draw.randrange(2, 11)))
        pieces[draw.choice(["Ġ", ""]) + word] = None
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<end {token}>" for token in sorted(end_ids)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


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
        end = config.get("eos_token_id") or []
        write_tokenizer(copy, config["vocab_size"], [end] if isinstance(end, int) else end)
        yield str(copy)


@dataclass(frozen=True)
class _Row:
    """One measurement."""

    number: int  # of the round
    result: LevelResult
    ratio: float | None  # to the throughput without the schema; None without the schema

    @property
    def drafts(self) -> str:
        """Return "on" or "off"."""
        return "on" if self.result.drafting else "off"

    def cells(self) -> list[str]:
        """Return the cells of the printed table."""
        result, seconds = self.result, step_seconds(self.result.steady_counters or self.result.counters)
        return [
            str(self.number),
            self.drafts,
            "no" if self.ratio is None else "yes",
            f"{result.tokens_per_s:.0f}",
            "" if self.ratio is None else f"{self.ratio:.3f}",
            f"{result.acceptance.length or 1:.2f}",
            *(f"{1000 * seconds[phase]:.2f}" for phase in PHASES),
        ]

    def level(self) -> dict[str, Any]:
        """Return the figures for the result file."""
        return {"round": self.number, "ratio": self.ratio, **describe_level(self.result)}


def _prompts(length: int, seed: int, info: pb.GetVerifierInfoResponse) -> Iterator[Prompt]:
    return random_prompts(length, info.vocab_size, seed)


@contextmanager
def _served(pair: PairOptions, speculative_config: str) -> Iterator[str]:
    with with_tokenizer(pair.target) as target, running_pair(replace(pair, target=target), speculative_config) as found:
        yield found


@click.command()
@click.option("--server", metavar="HOST:PORT", help="Measure a running verifier, whose target has a tokenizer.")
@pair_options
@click.option("--concurrency", default=32, show_default=True, help="Concurrent requests.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of all four measurements.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Tokens per prompt.")
@click.option("--output-tokens", default=400, show_default=True, help="Tokens per output.")
@click.option("--json-schema", type=click.Path(exists=True, path_type=Path), help="File.  [default: an endless array]")
@click.option("--speculative-config", default=SYNTHETIC, show_default=True, help="Option of the started verifier.")
@json_option
def main(server: str | None, speculative_config: str, json_path: Path | None, **given: Any) -> None:
    """Print the throughput of the steady state with and without a schema, their ratio, and the phases of a step."""
    schema = SCHEMA if given["json_schema"] is None else json.loads(given["json_schema"].read_text(encoding="utf-8"))
    if server is not None and (given["target"] or given["head"]):
        raise click.UsageError("needs either --server or --target and --head")
    with (
        nullcontext(server)
        if server is not None
        else _served(pair_from(given).with_room_for(given["concurrency"]), speculative_config)
    ) as address:
        rows = [row for number in range(given["rounds"]) for row in _round(address, number, schema, given)]
    title = "Output tokens/s of the steady state, acceptance length, and an engine step, mean ms by phase"
    table = make_table(title, ("round", "drafts", "schema", "tokens/s", "ratio", "length", *PHASES))
    for row in rows:
        table.add_row(*row.cells())
    report_console().print(table)
    ratios = {drafts: [row.ratio for row in rows if row.ratio and row.drafts == drafts] for drafts in ("off", "on")}
    levels = [row.level() for row in rows]
    write_json(json_path, describe() | {"schema": schema, "schema_ratios": ratios, "rounds": levels})


def _round(address: str, number: int, schema: dict[str, Any], given: dict[str, Any]) -> list[_Row]:
    """Measure without and with the schema, each without and with drafts."""
    found: list[list[LevelResult]] = []
    samplings: list[dict[str, Any]] = [{}, {"structured_output": {"json_schema": schema}}]
    for sampling in samplings:
        options = ServeOptions(
            [Level(concurrency=given["concurrency"])],
            Shape(given["output_tokens"], 1.0, number, sampling),
            allows_skipped=True,
        )
        found.append(measure(address, options, partial(_prompts, given["prompt_tokens"], number))[1])
    rows = []
    for free, structured in zip(*found, strict=True):
        ratio = structured.tokens_per_s / free.tokens_per_s
        rows += [_Row(number, free, None), _Row(number, structured, ratio)]
    return rows


if __name__ == "__main__":
    main()
