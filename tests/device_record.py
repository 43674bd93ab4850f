"""Copies and kernels of a GPU, from the record of torch's profiler."""

import json
from pathlib import Path

from torch.profiler import profile


def copies_to_host(run: profile) -> int:
    """Return the number of device-to-host copies that `run` recorded.

    No copy may go to pageable memory: the host would wait for the copy and for all work before it.
    """
    counts = {event.key: event.count for event in run.key_averages() if event.key.startswith("Memcpy DtoH")}
    others = {name: count for name, count in counts.items() if not name.endswith("-> Pinned)")}
    assert not others, f"copies to memory that is not pinned: {others}"
    return sum(counts.values())


def streams_of_kernels(run: profile, trace: Path) -> dict[int, set[str]]:
    """Return the names of recorded kernels by stream number; copies and memsets do not count.

    Parameters
    ----------
    trace
        File to write the trace to.
    """
    run.export_chrome_trace(str(trace))
    streams: dict[int, set[str]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            streams.setdefault(event["args"]["stream"], set()).add(event["name"])
    return streams
