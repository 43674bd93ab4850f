"""Timing on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda"


def device_times(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, by CUDA events."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return times


def replay_time(call: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of one call in a replayed graph of `copies` calls, which get their indices."""
    graph = _capture(call, copies)
    return statistics.median(device_times(graph.replay, 9)[2:]) * 1e6 / copies


def _capture(call: Callable[[int], object], copies: int) -> torch.cuda.CUDAGraph:
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
    return 2 * source.nbytes / statistics.median(device_times(lambda: target.copy_(source), 5))


def product_rate() -> float:
    """Return the operations per second of a bfloat16 matrix product of 8192 on random data."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(device_times(lambda: a @ b, 7)[2:])


def kernel_times(call: Callable[[], object], repeats: int = 20) -> list[dict[str, Any]]:
    """Return `kernel`, `launches` and `us` per call of each kernel, in descending order of time."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [one for one in profiler.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
    rows = [
        {"kernel": one.key[:90], "launches": one.count / repeats, "us": one.self_device_time_total / repeats}
        for one in events
    ]
    return sorted((row for row in rows if row["us"] > 0), key=lambda row: -row["us"])
