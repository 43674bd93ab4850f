"""Records the time between the kernels of a verifier's forward passes while a command runs the services.

    python -m draftwire_bench.kernel_gaps [--json FILE] -- draftwire bench serve --concurrency 1,8 ...

torch's profiler records 30 steps per level of load in the verifier's engine process (hook/passes.py). For each record,
prints two medians over the forward passes with the same CUDA graph: the microseconds in kernels, and the microseconds
between kernels, which are negative if kernels overlap. Neither depends on a slow host, which makes steps longer. The
command's own measurements are not valid, because starting and stopping the profiler takes time.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from draftwire_bench.environment import describe
from draftwire_bench.watched import run_watched

# A launch with fewer kernels is not a forward pass.
LEAST_KERNELS = 20


class Passes(NamedTuple):
    """The forward passes of one record."""

    num_passes: int
    num_kernels: int  # of each
    kernels_us: float
    gaps_us: float


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="File for the result.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(json_path: Path | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, print the records, and exit with the command's status."""
    with tempfile.TemporaryDirectory() as directory:
        status = run_watched(command, "DRAFTWIRE_KERNEL_GAPS", Path(directory))
        found = [(about, passes_of(events)) for about, events in read(Path(directory))]
    table = Table(title="microseconds of a pass", box=SIMPLE)
    for column in ("s", "requests", "drafts", "passes", "kernels", "in kernels", "between them"):
        table.add_column(column, justify="right")
    for about, passes in found:
        cells = ["0", "no CUDA graphs", "", ""]
        if passes is not None:
            cells = [
                str(passes.num_passes),
                str(passes.num_kernels),
                f"{passes.kernels_us:.1f}",
                f"{passes.gaps_us:.1f}",
            ]
        seconds = about["at"] - found[0][0]["at"]
        table.add_row(f"{seconds:.1f}", str(about["requests"]), "yes" if about["has_drafts"] else "no", *cells)
    Console(width=max(Console().width, 100)).print(table)
    if json_path is not None:
        records = [about | ({} if passes is None else passes._asdict()) for about, passes in found]
        json_path.write_text(json.dumps(describe() | {"records": records}, indent=1) + "\n", encoding="utf-8")
    sys.exit(status)


def read(directory: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the description and the trace's events of each record, in order."""
    paths = sorted(directory.glob("*.about"), key=lambda path: int(path.stem))
    return [
        (json.loads(path.read_text()), json.loads(path.with_suffix(".json").read_text())["traceEvents"])
        for path in paths
    ]


def passes_of(events: Sequence[Mapping[str, Any]]) -> Passes | None:
    """Return the passes that have the most frequent number of kernels; None without a pass.

    Args:
        events: Events of a trace in Chrome's format. Events of the category "kernel" have `ts` and `dur` in
            microseconds, and `args.correlation`, which is the same for all kernels of a launch.
    """
    launches: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            launches.setdefault(event["args"]["correlation"], []).append((event["ts"], event["dur"]))
    passes = [sorted(kernels) for kernels in launches.values() if len(kernels) >= LEAST_KERNELS]
    if not passes:
        return None
    ((num_kernels, num_passes),) = Counter(map(len, passes)).most_common(1)
    alike = [kernels for kernels in passes if len(kernels) == num_kernels]
    in_kernels = [sum(taken for _, taken in kernels) for kernels in alike]
    whole = [kernels[-1][0] + kernels[-1][1] - kernels[0][0] for kernels in alike]
    gaps = [total - inside for total, inside in zip(whole, in_kernels, strict=True)]
    return Passes(num_passes, num_kernels, statistics.median(in_kernels), statistics.median(gaps))


if __name__ == "__main__":
    main()
