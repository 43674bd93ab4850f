"""The command `draftwire bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from draftwire.contract.errors import BenchmarkError
from draftwire_bench.commands.options import Numbers
from draftwire_bench.environment import describe
from draftwire_bench.output import json_option, make_table, report_console, write_json

if TYPE_CHECKING:
    from draftwire_bench.kernels.kernels import Row


@click.command()
@click.option("--batches", type=Numbers(int), default="1,8,32,128,256", show_default=True, help="Concurrent requests.")
@click.option("--only", default="", metavar="NAME", help="Only rows with this text in their names.  [default: all]")
@click.option(
    "--peer",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory with vLLM's gumbel.py and rejection_sampler_utils.py (Model Runner V2), to time for comparison.",
)
@json_option
def kernels(batches: Sequence[int], only: str, peer: Path | None, json_path: Path | None) -> None:
    """Measure the sampling kernels on a GPU, and compare them to the memory bandwidth.

    V = 128256, k = 5, temperature 1. The floor is the time to read every row once at the run's copy bandwidth.
    """
    # Imported here because importing torch takes seconds, which --help should not.
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError("needs a GPU, and CUDA is not available")
    from draftwire_bench.gpu_time import copy_bandwidth
    from draftwire_bench.kernels.kernels import measure_kernels
    from draftwire_bench.kernels.peer import load_peer

    beside = None if peer is None else load_peer(peer)
    console, document = report_console(), describe()
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    with console.status("") as status:
        for batch in batches:
            status.update(f"batch {batch}")
            for row in measure_kernels(batch, beside, bandwidth, only):
                rows.append(row)
                status.update(f"batch {batch}: {row.name} {row.us:.1f} us")
            # After each batch, so that an interruption loses at most one.
            write_json(json_path, document | _report(rows, bandwidth))
    title = f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e12:.2f} TB/s; microseconds"
    console.print(_table(rows, title))


def _report(rows: Sequence[Row], bandwidth: float) -> dict[str, Any]:
    import torch

    from draftwire_bench.kernels.kernels import K, V

    return {
        "benchmark": "kernels",
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "shape": {"vocabulary": V, "drafts": K, "temperature": 1.0},
        "rows": [vars(row) for row in rows],
    }


def _table(rows: Sequence[Row], title: str) -> Table:
    columns = ("kernel", "batch", "ours", "peer", "peer / ours", "MB", "floor", "ours / floor", "accepted")
    table = make_table(title, columns, ["kernel"])
    for row in rows:
        table.add_row(
            row.name,
            str(row.batch),
            f"{row.us:.1f}",
            "" if row.peer_us is None else f"{row.peer_us:.1f}",
            "" if row.peer_us is None else f"{row.peer_us / row.us:.2f}",
            f"{row.megabytes:.1f}",
            f"{row.floor_us:.1f}",
            f"{row.us / row.floor_us:.2f}",
            "" if row.accepted is None else f"{row.accepted:.2f}",
        )
    return table
