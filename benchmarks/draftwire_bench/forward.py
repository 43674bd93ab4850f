"""The target's forward pass with random weights, on one GPU or split over several: its time, and its kernels.

    python -m draftwire_bench.forward --json forward.json
    python -m draftwire_bench.forward --gpus 1,2 --json tensor-parallel.json

A batch BxQ is B sequences with Q rows each: after --context rows for --batches, whole prompts for --prompts. Times are
those of the verifier's runner, with input copies, CUDA graphs and the other ranks: back to back, of a single step, and
of the single step's launch on the host. Each number of GPUs is measured in a new process, whose start is timed too.
`--device cpu --target models/demo/target --batches 1x1,2x5 --prompts 1x8 --max-num-seqs 2` runs without GPUs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from draftwire.contract.validation import parse_speculative_config
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import choose_device
from draftwire.model.kv_cache import SequenceRows
from draftwire_bench.commands.options import Numbers
from draftwire_bench.environment import SHAPES, describe
from draftwire_bench.gpu_time import kernel_times
from draftwire_bench.output import json_option, make_table, report_console, write_json
from verifier_service.core.batch import ForwardInput
from verifier_service.host.ranks import RunStep, Workers
from verifier_service.host.target_start import start_target
from verifier_service.options import VerifierOptions
from verifier_service.target.runner import start_runner
from verifier_service.target.tensor_parallel import ALONE

MEASURED = "measured: "  # prefix of the line with a child process's result
TIMEOUT_S = 600.0  # of one number of GPUs, with compilation
MOST_KERNELS = 20  # listed of a step
WARM_STEPS, ROUNDS, REPEATS, SINGLE_STEPS = 3, 7, 20, 30


@click.command()
@click.option("--target", default=str(SHAPES / "llama-3.1-8b"), show_default=True, metavar="DIR|ID")
@click.option("--device", default="cuda:0", show_default=True, help="First GPU.")
@click.option("--gpus", type=Numbers(int), default="1", show_default=True, help="Numbers of GPUs.")
@click.option("--batches", default="1x1,1x5,8x5,32x5,64x5,64x1", show_default=True, help="Decoding sequences.")
@click.option("--prompts", default="1x64,1x128,1x256,1x512", show_default=True, help="Steps with only prompts.")
@click.option("--profiled", default="1x5,32x5", show_default=True, help="Batches whose kernels are listed.")
@click.option("--context", default=512, show_default=True, help="Rows of each sequence before a batch's step.")
@click.option("--max-num-seqs", default=64, show_default=True, type=click.IntRange(1))
@click.option("--max-prefill-rows", default=512, show_default=True, type=click.IntRange(1))
@click.option("--max-model-len", default=1024, show_default=True, type=click.IntRange(1))
@click.option("--num-speculative-tokens", default=4, show_default=True, type=click.IntRange(1), help="k.")
@json_option
@click.option("--measure", type=int, hidden=True, help="Only this number of GPUs, in this process.")
def main(json_path: Path | None, measure: int | None, **given: Any) -> None:
    """Measure and print."""
    parsed = {name: parse_batches(name, given) for name in ("batches", "prompts", "profiled")}
    if measure is not None:
        print(MEASURED + json.dumps(_measure(measure, given | parsed)), flush=True)
        os._exit(0)  # see `Workers.close`
    result: dict[str, Any] = {**describe(), "target": Path(given["target"]).name, "context": given["context"]}
    result["sizes"] = {}
    for size in given["gpus"]:
        result["sizes"][size] = _measure_apart(size, given)
        write_json(json_path, result)
    _print(result["sizes"], report_console())


def parse_batches(name: str, given: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the sequences and rows of each batch of an option, such as "1x5,8x5"; none if empty.

    Raises:
        BadParameter: If a batch is not BxQ, or its rows or sequences are more than the runner is started for.
    """
    context = 0 if name == "prompts" else given["context"]
    most_rows, most_sequences = given["max_model_len"] - context, given["max_num_seqs"]
    batches = []
    for text in filter(None, given[name].split(",")):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        count, rows = (int(found[1]), int(found[2])) if found else (0, 0)
        if not (0 < count <= most_sequences and rows <= most_rows):
            allowed = f"sequences x rows, as in 1x5: at most {most_sequences} sequences of {most_rows} rows"
            raise click.BadParameter(f"{text!r}: allowed: {allowed}", param_hint=name)
        if name == "prompts" and count * rows > given["max_prefill_rows"]:
            raise click.BadParameter(f"{text!r}: allowed: {given['max_prefill_rows']} rows in all", param_hint=name)
        batches.append((count, rows))
    return batches


def _measure_apart(size: int, given: dict[str, Any]) -> dict[str, Any]:
    """Run `_measure` in a new process, so that the GPUs' memory is free."""
    command = [sys.executable, "-m", "draftwire_bench.forward", "--measure", str(size)]
    for name, value in given.items():
        if name != "gpus":
            command += [f"--{name.replace('_', '-')}", str(value)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S)
    lines = [line for line in child.stdout.splitlines() if line.startswith(MEASURED)]
    if not lines:
        raise click.ClickException(f"the measurement ended with status {child.returncode} and without a result")
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix(MEASURED))
    return measured


def _measure(size: int, given: dict[str, Any]) -> dict[str, Any]:
    k, max_num_seqs = given["num_speculative_tokens"], given["max_num_seqs"]
    options = VerifierOptions(
        target=given["target"],
        device=given["device"],
        load_format="dummy",
        max_num_seqs=max_num_seqs,
        max_model_len=given["max_model_len"],
        max_prefill_rows=given["max_prefill_rows"],
        kv_cache_tokens=max_num_seqs * given["max_model_len"],
        speculative_config=json.dumps({"num_speculative_tokens": k}),
        tensor_parallel_size=size,
    )
    config = parse_speculative_config(options.speculative_config)
    device = choose_device(options.device)
    is_gpu = device.type == "cuda"
    began = time.monotonic()
    with Workers(options, device) if size > 1 else nullcontext() as workers:
        target, num_blocks = start_target(options, config, device, ALONE if workers is None else workers.rank)
        runner = start_runner(target, num_blocks, max_num_seqs, k, options.max_prefill_rows)
        run = runner.run if workers is None else workers.lead(runner.run)
        measured: dict[str, Any] = {"start_s": time.monotonic() - began}
        context = given["context"]
        steps = {f"{count}x{rows}": decode_step(count, rows, context) for count, rows in given["batches"]}
        prompts = {f"{count}x{rows}": prompts_step(count, rows) for count, rows in given["prompts"]}
        measured["batches"] = {name: _step_times(run, step, device) for name, step in steps.items()}
        measured["prompts"] = {name: _step_times(run, step, device) for name, step in prompts.items()}
        measured["kernels"] = {
            f"{count}x{rows}": kernel_times(partial(run, decode_step(count, rows, context)))
            for count, rows in (given["profiled"] if is_gpu else ())
        }
        measured["peak_gib_of_rank_0"] = torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else None
    return measured


def decode_step(count: int, rows: int, context: int) -> ForwardInput:
    """Return a step of `count` sequences with `rows` random tokens each after `context` rows, with logits of all."""
    rng = np.random.default_rng(count * 100 + rows)
    each = blocks_for(context + rows)
    return ForwardInput(
        rng.integers(0, 1000, count * rows),
        np.tile(np.arange(context, context + rows), count),
        [SequenceRows(range(1 + each * i, 1 + each * (i + 1)), context, rows) for i in range(count)],
        np.arange(count * rows),
    )


def prompts_step(count: int, rows: int) -> ForwardInput:
    """Return a step of `count` whole prompts of `rows` rows, with the logits of their last rows."""
    return replace(decode_step(count, rows, 0), logit_rows=np.arange(1, count + 1) * rows - 1)


def _step_times(run: RunStep, step: ForwardInput, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of steps back to back, of a single one, and of its launch on the host."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(WARM_STEPS):
        run(step)
    rounds, singles, launches = [], [], []
    for _ in range(ROUNDS):
        began = wait()
        for _ in range(REPEATS):
            run(step)
        rounds.append((wait() - began) / REPEATS)
    for _ in range(SINGLE_STEPS):
        began = wait()
        run(step)
        launches.append(time.perf_counter() - began)
        singles.append(wait() - began)
    times = {"step_ms": rounds, "alone_ms": singles, "launch_ms": launches}
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def _print(sizes: dict[int, dict[str, Any]], console: Console) -> None:
    for part in ("batches", "prompts"):
        columns = [f"{size} GPU{'s' * (size > 1)}: {what}" for size in sizes for what in ("step", "alone", "launch")]
        table = make_table(f"{part}, milliseconds", ("sequences x rows", *columns))
        for batch in next(iter(sizes.values()))[part]:
            times = [value for measured in sizes.values() for value in measured[part][batch].values()]
            table.add_row(batch, *(f"{value:.2f}" for value in times))
        console.print(table)
    for size, measured in sizes.items():
        for batch, rows in measured["kernels"].items():
            table = make_table(f"kernels of a step of {batch} on {size}", ("us", "launches", "kernel"), ["kernel"])
            for row in rows[:MOST_KERNELS]:
                table.add_row(f"{row['us']:.0f}", f"{row['launches']:.0f}", row["kernel"])
            console.print(table)
        console.print(f"start with {size}: {measured['start_s']:.1f} s")


if __name__ == "__main__":
    main()
