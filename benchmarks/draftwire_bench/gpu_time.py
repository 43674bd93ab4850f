"""Timing on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

DEVICE = "cuda"


def replay_time(call: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of one call in a replayed graph of `copies` calls, which get their indices."""
    return graph_time(capture(call, copies)) / copies


def capture(call: Callable[[int], object], copies: int) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls with 0 .. `copies` - 1, after a warm-up of each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(copies):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(copies):
            call(i)
    return graph


def graph_time(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median microseconds of a replay."""
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def eager_time(call: Callable[[], object]) -> float:
    """Return the median microseconds of a call, including the host's work."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Return the bytes per second of a device-to-device copy, read and written."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / statistics.median(times)


def product_rate() -> float:
    """Return the operations per second of a bfloat16 matrix product of 8192 on random data."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * 8192**3 / statistics.median(times[2:])
