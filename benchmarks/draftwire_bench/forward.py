"""The target's forward pass on one GPU with random weights, compared to the time of its linear layers.

    python -m draftwire_bench.forward [--target DIR] [--batches 1x1,1x5,8x5] [--context 512] [--json FILE]

A batch BxQ is B sequences with Q rows each. For each batch: the step with the verifier's runner (input copies and one
CUDA graph), back to back by the GPU's clock and single by the host's clock; the matrix products of the merged linear
layers in one CUDA graph in the same process; the ratio. The same follows for steps that contain only prompts, which
run without a graph if they are larger than the largest graph; then the kernels of one step, the time of each graph, and
the start's time with an empty and with a filled cache of compiled code.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from draftwire.model.block_pool import blocks_for
from draftwire.model.checkpoints import read_config
from draftwire.model.devices import make_current
from draftwire.model.kv_cache import KVCache, SequenceRows
from draftwire_bench.environment import describe
from verifier_service.core.batch import ForwardInput
from verifier_service.target.compile_cache import use_compile_cache
from verifier_service.target.runner import TargetRunner
from verifier_service.target.target import load_target

SHAPE = Path(__file__).resolve().parents[1] / "shapes" / "llama-3.1-8b"
BATCHES = "1x1,1x5,8x5,32x5,64x5,64x1"
PROMPTS = "1x64,1x128,1x256,1x512"
DEVICE = torch.device("cuda:0")
START = "start: "  # prefix of the line with a child process's start times


@click.command()
@click.option("--target", type=click.Path(path_type=Path), default=SHAPE, show_default=True)
@click.option("--batches", default=BATCHES, show_default=True)
@click.option("--prompts", default=PROMPTS, show_default=True, help="Batches of steps that contain only prompts.")
@click.option("--context", default=512, show_default=True, help="Rows of each sequence before a batch's step.")
@click.option("--max-num-seqs", default=64, show_default=True)
@click.option("--max-prefill-rows", default=512, show_default=True)
@click.option("--max-model-len", type=int, help="Maximum number of positions of a sequence.  [default: the target's]")
@click.option("--rows-per-sequence", default=5, show_default=True)
@click.option("--profiled", default="1x5,32x5", show_default=True, help="Batches whose kernels are listed.")
@click.option("--start-only", is_flag=True, hidden=True)
@click.option("--skip-warm-start", is_flag=True, help="Do not measure a second start.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the result.")
def main(
    target: Path,
    batches: str,
    prompts: str,
    context: int,
    max_num_seqs: int,
    max_prefill_rows: int,
    max_model_len: int | None,
    rows_per_sequence: int,
    profiled: str,
    start_only: bool,
    skip_warm_start: bool,
    json_path: Path | None,
) -> None:
    """Measure and print."""
    console = Console(width=120)
    config = read_config(target)
    with tempfile.TemporaryDirectory() as scratch:
        if not start_only:
            use_compile_cache(f"{scratch}/torch")
            os.environ["TRITON_CACHE_DIR"] = f"{scratch}/triton"
        runner, start = _start(target, context, max_num_seqs, max_prefill_rows, max_model_len, rows_per_sequence)
        if start_only:
            print(START + json.dumps(start), flush=True)
            return
        result: dict[str, Any] = {**describe(), "context": context, "start": {"cold": start}}
        with torch.inference_mode():
            result["batches"] = [
                _measure(config, runner, decode_step(*batch, context)) for batch in parse_batches(batches)
            ]
            result["prompts"] = [_measure(config, runner, _prompts_step(*batch)) for batch in parse_batches(prompts)]
            result["kernels"] = {
                f"{count}x{rows}": _kernels(runner, decode_step(count, rows, context))
                for count, rows in parse_batches(profiled)
            }
        result["graphs"] = [
            {"sequences": bucket.num_sequences, "rows": bucket.num_rows, "seconds": seconds}
            for bucket, seconds in runner.seconds.items()
        ]
        if not skip_warm_start:
            result["start"]["warm"] = _warm_start()
    _print(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def parse_batches(batches: str) -> list[tuple[int, int]]:
    """Return the sequences and rows of each of "1x5,8x5"."""
    pairs = [batch.split("x") for batch in batches.split(",") if batch]
    return [(int(count), int(rows)) for count, rows in pairs]


def _start(
    directory: Path,
    context: int,
    max_num_seqs: int,
    max_prefill_rows: int,
    max_model_len: int | None,
    rows_per_sequence: int,
) -> tuple[TargetRunner, dict[str, float]]:
    """Start the verifier's parts; return the runner, and seconds and GiB of each part."""
    make_current(DEVICE)
    start: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.reset_peak_memory_stats(DEVICE)
        free, began = torch.cuda.mem_get_info(DEVICE)[0], time.monotonic()
        made = work()
        torch.cuda.synchronize(DEVICE)
        start[f"{name}_s"] = time.monotonic() - began
        start[f"{name}_gib"] = (free - torch.cuda.mem_get_info(DEVICE)[0]) / 2**30
        start[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated(DEVICE) / 2**30
        return made

    options: dict[str, Any] = {"max_model_len": max_model_len, "dummy": True}
    target = timed("load", lambda: load_target(directory, "target", torch.bfloat16, DEVICE, **options))
    timed("compile", target.compile)
    blocks = max_num_seqs * blocks_for(context + rows_per_sequence) + 1
    cache = KVCache(target.layer_shapes, blocks, target.dtype, DEVICE)
    longest = blocks_for(target.max_model_len)
    runner = TargetRunner(target, cache, max_num_seqs, rows_per_sequence, max_prefill_rows, longest)
    timed("capture", runner.capture)
    return runner, start


def _warm_start() -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, __file__, *_without_json(sys.argv[1:]), "--start-only"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith(START)]
    if not lines:
        raise click.ClickException(f"the second start failed: {child.stderr[-2000:]}")
    start: dict[str, float] = json.loads(lines[-1][len(START) :])
    return start


def _without_json(arguments: list[str]) -> list[str]:
    """Return the arguments without the result file."""
    if "--json" in arguments:
        at = arguments.index("--json")
        return arguments[:at] + arguments[at + 2 :]
    return arguments


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


def _prompts_step(count: int, rows: int) -> ForwardInput:
    """Return a step of `count` whole prompts of `rows` rows, with the logits of their last rows."""
    return replace(decode_step(count, rows, 0), logit_rows=np.arange(1, count + 1) * rows - 1)


def _measure(config: dict[str, Any], runner: TargetRunner, step: ForwardInput) -> dict[str, Any]:
    forward_ms, wall_ms = _time(lambda: runner.run(step))
    host_ms = _host_ms(lambda: runner.run(step))
    num_rows = len(step.positions)
    linear_ms = _linear_ms(config, num_rows)
    return {
        "sequences": len(step.sequences),
        "rows": num_rows,
        "forward_ms": forward_ms,
        "wall_ms": wall_ms,
        "host_ms": host_ms,
        "linear_ms": linear_ms,
        "ratio": forward_ms / linear_ms,
    }


def _time(run: Callable[[], object], repeats: int = 20, rounds: int = 7) -> tuple[float, float]:
    """Return the median milliseconds of a run: on the GPU, of runs back to back; on the host, until the GPU is idle."""
    for _ in range(3):
        run()
    on_gpu, on_host = [], []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        on_gpu.append(begin.elapsed_time(end) / repeats)
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(DEVICE)
        on_host.append((time.perf_counter() - began) * 1e3)
    return statistics.median(on_gpu), statistics.median(on_host)


def _host_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median milliseconds until a run has been launched on an idle GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize(DEVICE)
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _linear_ms(config: dict[str, Any], num_rows: int) -> float:
    """Return the milliseconds of one CUDA graph with the matrix products of the target's merged linear layers."""
    hidden, wide, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = [((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * wide, hidden), (hidden, wide)]
    shapes = layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]
    weights = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * 0.02 for shape in shapes]
    inputs = {
        weight.shape[1]: torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=DEVICE) for weight in weights
    }

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    products()
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return _time(graph.replay)[0]


def _kernels(runner: TargetRunner, step: ForwardInput, most: int = 15) -> list[dict[str, Any]]:
    """Return the microseconds and launches of each kernel in one step."""
    runner.run(step)
    torch.cuda.synchronize(DEVICE)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runner.run(step)
        torch.cuda.synchronize(DEVICE)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    rows = [{"kernel": name, "us": sum(times), "launches": len(times)} for name, times in spent.items()]
    rows.sort(key=lambda row: -float(str(row["us"])))
    others = rows[most:]
    if others:
        total = sum(float(str(row["us"])) for row in others)
        launches = sum(int(str(row["launches"])) for row in others)
        rows = [*rows[:most], {"kernel": f"{len(others)} others", "us": total, "launches": launches}]
    return rows


def _print(result: dict[str, Any], console: Console) -> None:
    for part, context in (("batches", result["context"]), ("prompts", 0)):
        table = Table(title=f"forward pass, {context} rows of context, milliseconds")
        for column in ("sequences x rows", "forward", "alone, wall", "host", "linear layers", "ratio"):
            table.add_column(column, justify="right")
        for row in result[part]:
            table.add_row(
                f"{row['sequences']} x {row['rows'] // row['sequences']}",
                *(f"{row[name]:.2f}" for name in ("forward_ms", "wall_ms", "host_ms", "linear_ms")),
                f"{row['ratio']:.2f}",
            )
        console.print(table)
    for name, rows in result["kernels"].items():
        table = Table(title=f"kernels of a step of {name}")
        for column in ("microseconds", "launches", "kernel"):
            table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
        for row in rows:
            table.add_row(f"{row['us']:.0f}", str(row["launches"]), row["kernel"][:90])
        console.print(table)
    table = Table(title="graphs, only padding")
    for column in ("sequences", "rows", "milliseconds"):
        table.add_column(column, justify="right")
    for row in result["graphs"]:
        table.add_row(str(row["sequences"]), str(row["rows"]), f"{row['seconds'] * 1e3:.3f}")
    console.print(table)
    for name, start in result["start"].items():
        console.print(f"{name} start:", ", ".join(f"{part} {value:.2f}" for part, value in start.items()))


if __name__ == "__main__":
    main()
