"""What a GPU did, by the driver's own record."""

import json
from pathlib import Path

from torch.profiler import profile


def copies_to_host(run: profile) -> int:
    """How many copies from the device to the host were made while `run` recorded the device.

    None may be to pageable memory: the host would wait for it, and for all that goes before it.
    """
    counts = {event.key: event.count for event in run.key_averages() if event.key.startswith("Memcpy DtoH")}
    others = {name: count for name, count in counts.items() if not name.endswith("-> Pinned)")}
    assert not others, f"copies to memory that is not pinned: {others}"
    return sum(counts.values())


def streams_of_kernels(run: profile, trace: Path) -> dict[int, set[str]]:
    """The kernels that ran meanwhile, by the number of their stream; copies and fills with zeros are none.

    Parameters
    ----------
    trace
        A file that is written.
    """
    run.export_chrome_trace(str(trace))
    streams: dict[int, set[str]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            streams.setdefault(event["args"]["stream"], set()).add(event["name"])
    return streams
