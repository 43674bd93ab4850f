"""The time of a graph of kernels after the process has used a second stream.

    python -m draftwire_bench.second_stream [--kernels 320] [--times 60] [--json FILE]

A graph of small matrix products and sums is replayed and timed, before and after `--times` replays that each follow a
launch on a second stream. Each row is a new process, because the effect lasts as long as the process. Times are
microseconds per kernel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table

from draftwire_bench.environment import describe
from draftwire_bench.gpu_time import DEVICE, capture, graph_time

NUM_VALUES, WIDTH = 2**16, 2048
NUM_BYTES = 2**20
# An idle GPU needs some tenths of a second to reach its full clock rate.
WARM_UP_S = 0.8


class Buffers(NamedTuple):
    """One buffer in pinned memory and two on the GPU, [NUM_BYTES] uint8 each."""

    host: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor


class Case(NamedTuple):
    """A launch on the second stream."""

    launch: Callable[[Buffers], object]
    waits: bool = False  # each stream waits for the other
    alone: bool = False  # the GPU is idle otherwise


def _to_host(buffers: Buffers) -> None:
    buffers.host.copy_(buffers.here, non_blocking=True)


def _add(buffers: Buffers) -> None:
    buffers.here.add_(1)


CASES = {
    "nothing": Case(lambda _: None),
    "events, with waits": Case(lambda _: None, waits=True),
    "a copy to the host": Case(_to_host),
    "a copy to the host, with waits": Case(_to_host, waits=True),
    "a copy from the host": Case(lambda buffers: buffers.here.copy_(buffers.host, non_blocking=True)),
    "a copy within the device": Case(lambda buffers: buffers.there.copy_(buffers.here)),
    "a kernel": Case(_add),
    "a kernel, with waits": Case(_add, waits=True),
    "a kernel while nothing else runs": Case(_add, alone=True),
}


@click.command()
@click.option("--kernels", default=320, show_default=True, type=click.IntRange(2), help="In the graph; even.")
@click.option("--times", default=60, show_default=True, type=click.IntRange(1), help="Uses of the second stream.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="File for the result.")
def main(kernels: int, times: int, json_path: Path | None) -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        raise click.ClickException("this measures a GPU")
    table = Table("on the second stream", "before", "after", "more", title="microseconds per kernel")
    found = {}
    for name in CASES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            before, after = process.submit(measure, name, kernels // 2, times).result()
        found[name] = {"before_us": before, "after_us": after}
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(describe() | {"cases": found}, indent=1) + "\n", encoding="utf-8")


def measure(name: str, pairs: int, times: int) -> tuple[float, float]:
    """Return microseconds per kernel of a graph of `pairs` sums and products, before and after the case's launches."""
    values = torch.zeros(NUM_VALUES, device=DEVICE)
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.randn(5, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    graph = capture(lambda _: (values.add_(1), torch.mm(rows, weight)), pairs)
    on_host = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    buffers = Buffers(on_host, *(torch.zeros(NUM_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)))
    before = _warm_time(graph)
    steps, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(times):
        _use(beside, steps, CASES[name], buffers)
        graph.replay()
    torch.cuda.synchronize()
    return before / (2 * pairs), _warm_time(graph) / (2 * pairs)


def _use(beside: torch.cuda.Stream, steps: torch.cuda.Stream, case: Case, buffers: Buffers) -> None:
    if case.waits:
        beside.wait_stream(steps)
    if case.alone:
        torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        case.launch(buffers)
    if case.alone:
        torch.cuda.synchronize()
    if case.waits:
        steps.wait_stream(beside)


def _warm_time(graph: torch.cuda.CUDAGraph) -> float:
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        graph_time(graph)
    return graph_time(graph)


if __name__ == "__main__":
    main()
