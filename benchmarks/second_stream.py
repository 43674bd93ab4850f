"""What a graph of kernels takes once a second stream of the process has been used.

    python -m benchmarks.second_stream [--kernels 320] [--times 60]

A graph of small products and sums is replayed and timed; then again, after something was launched on a second stream
before each of `--times` replays. Each row is a process of its own, for what changes stays as long as the process.
Microseconds a kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import click
import torch
from rich.console import Console
from rich.table import Table

NUM_VALUES, WIDTH = 2**16, 2048
NUM_BYTES = 2**20
CASES = (
    "nothing",
    "an event, and waits",
    "a copy to the host",
    "a copy to the host, and waits",
    "a copy from the host",
    "a copy within the device",
    "a kernel",
    "a kernel, and waits",
    "a kernel while nothing runs",
)
# A GPU that was idle takes some tenths of a second to be as fast as it will be.
WARM_UP_S = 0.8


@click.command()
@click.option("--kernels", default=320, show_default=True, type=click.IntRange(2), help="In the graph.")
@click.option("--times", default=60, show_default=True, type=click.IntRange(1), help="That the stream is used.")
def main(kernels: int, times: int) -> None:
    """Measures and prints."""
    if not torch.cuda.is_available():
        raise click.ClickException("this measures a GPU")
    table = Table("on the second stream", "before", "after", "more", title="microseconds a kernel")
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            before, after = process.submit(measure, case, kernels, times).result()
        table.add_row(case, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    Console().print(table)


def measure(case: str, kernels: int, times: int) -> tuple[float, float]:
    """Microseconds a kernel of the graph before the second stream is used in the way of the case, and after."""
    values = torch.zeros(NUM_VALUES, device="cuda")
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(5, WIDTH, dtype=torch.bfloat16, device="cuda")
    pairs = kernels // 2
    graph = _graph(pairs, lambda: (values.add_(1), torch.mm(rows, weight)))
    use = _use(case)
    _warm_up(graph)
    before = _time(graph)
    for _ in range(times):
        use()
        graph.replay()
    torch.cuda.synchronize()
    _warm_up(graph)
    return before / (2 * pairs), _time(graph) / (2 * pairs)


def _graph(pairs: int, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(pairs):
                launch()
    torch.cuda.synchronize()
    return graph


def _use(case: str) -> Callable[[], None]:
    steps, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    on_host = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    what, *how = case.split(", and ")
    works: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "an event": lambda: None,
        "a copy to the host": lambda: on_host.copy_(here, non_blocking=True),
        "a copy from the host": lambda: here.copy_(on_host, non_blocking=True),
        "a copy within the device": lambda: there.copy_(here),
        "a kernel": lambda: here.add_(1),
        "a kernel while nothing runs": lambda: here.add_(1),
    }

    def use() -> None:
        if how:
            beside.wait_stream(steps)
        if what.endswith("nothing runs"):
            torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            works[what]()
        if what.endswith("nothing runs"):
            torch.cuda.synchronize()
        if how:
            steps.wait_stream(beside)

    return use


def _warm_up(graph: torch.cuda.CUDAGraph) -> None:
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        _time(graph)


def _time(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a replay."""
    taken = []
    for _ in range(30):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended) * 1e3)
    return statistics.median(taken[10:])


if __name__ == "__main__":
    main()
