"""The command `draftwire bench acceptance`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwire.client import Client
from draftwire.contract.errors import BenchmarkError, InvalidArgumentError
from draftwire_bench.commands.options import Numbers, pair_from, pair_options
from draftwire_bench.environment import describe
from draftwire_bench.output import json_option, report_console, write_json
from draftwire_bench.serve.load import ClientPool
from draftwire_bench.serve.workload import read_prompts
from draftwire_bench.services import PairOptions, running_pair, wait_for_drafters

if TYPE_CHECKING:
    from draftwire_bench.acceptance.acceptance import Cell, Method
    from draftwire_bench.acceptance.recomputation import Continuation


@click.command()
@pair_options
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="JSON lines: `text` or `token_ids`.")
@click.option("--num-prompts", type=click.IntRange(1), help="Use the first N prompts.  [default: all]")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Use the first N tokens of each prompt.  [default: all]")
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1), help="Samples per prompt for T > 0.")
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1), help="Per continuation.")
@click.option("--temperatures", type=Numbers(float, least=0), default="0,0.7,1", show_default=True)
@click.option("--methods", metavar="NAME,...", help="Only these methods.  [default: all]")
@click.option("--num-speculative-tokens", default=4, show_default=True, type=click.IntRange(1, 16), help="k.")
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(1), help="Concurrent requests.")
@click.option("--parallel", default=1, show_default=True, type=click.IntRange(1), help="Methods in parallel.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first continuation.")
@json_option
def acceptance(json_path: Path | None, **given: Any) -> None:
    """Measure acceptance with every method, and compare the same steps to closed forms.

    Both services are started for each method. The served steps are then recomputed in this process, and each test of a
    draft is compared to its theoretical probability. The exit code is 1 if they deviate by more than chance.
    """
    # Imported here because importing torch takes seconds, which --help should not.
    from draftwire_bench.acceptance.acceptance import METHODS, evaluate
    from draftwire_bench.acceptance.report import find_deviations, print_report, report

    pair = pair_from(given).with_room_for(given["concurrency"])
    methods = _choose(METHODS, given.pop("methods"))
    temperatures = given.pop("temperatures")
    prompts = _token_ids(pair, given)
    console = report_console()
    workload = {name: given[name] for name in ("output_tokens", "num_speculative_tokens", "samples", "seed")}
    document = describe() | {
        "workload": {**workload, "prompts": len(prompts), "dtype": pair.dtype, "quantization": pair.quantization}
    }
    cells: list[Cell] = []
    with console.status("serving"), ThreadPoolExecutor(given["parallel"]) as pool:
        served = pool.map(partial(_serve, pair, prompts, temperatures, given), methods)
        models = _load(pair)
        for method, (by_temperature, seconds) in zip(methods, served, strict=True):
            began = time.monotonic()
            for temperature, continuations in zip(temperatures, by_temperature, strict=True):
                cells.append(evaluate(models, method, temperature, given["num_speculative_tokens"], continuations))
            again = time.monotonic() - began
            console.print(f"{method.name}: served in {seconds:.0f} s, recomputed in {again:.0f} s")
            # After each method, so that an interruption loses at most one.
            write_json(json_path, document | report(cells))
    print_report(cells, console)
    if find_deviations(cells):
        raise BenchmarkError("measured acceptance deviates from the closed form")


def _choose(methods: Sequence[Method], names: str | None) -> list[Method]:
    by_name = {method.name: method for method in methods}
    chosen = list(by_name) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in by_name:
            raise InvalidArgumentError("methods", name, f"allowed: {', '.join(by_name)}")
    return [by_name[name] for name in chosen]


def _token_ids(pair: PairOptions, given: dict[str, Any]) -> list[list[int]]:
    """Return the prompts as token ids, so that both sides of the comparison use the same tokens."""
    from draftwire.model.checkpoints import resolve_directory
    from verifier_service.core.tokenizer import TextCodec

    prompts = read_prompts(given.pop("prompts"))[: given.pop("num_prompts")]
    length = given.pop("prompt_tokens")
    codec = TextCodec(resolve_directory(pair.target)) if any(isinstance(p, str) for p in prompts) else None
    ids = [codec.encode(p) if codec is not None and isinstance(p, str) else list(p) for p in prompts]
    return [own[:length] for own in ids]  # type: ignore[misc]


def _serve(
    pair: PairOptions,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    given: dict[str, Any],
    method: Method,
) -> tuple[list[list[Continuation]], float]:
    """Serve all prompts at each temperature with one method; return the continuations and the seconds."""
    from draftwire_bench.acceptance.acceptance import continue_prompts

    began = time.monotonic()
    k = given["num_speculative_tokens"]
    config = json.dumps({**method.config, "num_speculative_tokens": k})
    with running_pair(pair, config) as address, Client(address) as client, ClientPool(address, 1) as pool:
        wait_for_drafters(client)
        continuations = [
            continue_prompts(
                pool,
                [prompt for prompt in prompts for _ in range(given["samples"] if temperature > 0 else 1)],
                temperature=temperature,
                output_tokens=given["output_tokens"],
                k=k,
                concurrency=given["concurrency"],
                seed=given["seed"],
            )
            for temperature in temperatures
        ]
    return continuations, time.monotonic() - began


def _load(pair: PairOptions) -> Any:
    from transformers.utils.logging import disable_progress_bar

    from draftwire.model.checkpoints import resolve_directory
    from draftwire.model.devices import choose_device, choose_dtype
    from draftwire_bench.acceptance.recomputation import Models

    if not sys.stderr.isatty():
        disable_progress_bar()
    device = choose_device(pair.verifier_device)
    target = resolve_directory(pair.target)
    dtype = choose_dtype(pair.dtype, device, target)
    return Models(target, resolve_directory(pair.head), dtype, device, pair.quantization)
