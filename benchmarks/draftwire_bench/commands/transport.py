"""The command `draftwire bench transport`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from draftwire.contract.errors import InvalidArgumentError
from draftwire_bench.environment import describe
from draftwire_bench.output import json_option, make_table, report_console, write_json

if TYPE_CHECKING:
    from draftwire_bench.transport.transport import Row

SIZES = "8KiB,40KiB,96KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
# A segment holds at least one tensor.
LARGEST = 128 << 20
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


@click.command()
@click.option("--sizes", default=SIZES, show_default=True, metavar="SIZE,SIZE,...", help="Bytes, KiB or MiB.")
@click.option("--sender-device", default="cpu", show_default=True, metavar="cpu|cuda[:INDEX]", help="Sender's.")
@click.option("--receiver-device", default="cpu", show_default=True, metavar="cpu|cuda[:INDEX]", help="Receiver's.")
@click.option("--repeats", default=200, show_default=True, type=click.IntRange(1), help="Maximum repeats per row.")
@json_option
def transport(sizes: str, sender_device: str, receiver_device: str, repeats: int, json_path: Path | None) -> None:
    """Measure the latency of tensors between two processes of this host, for every carrier.

    The processes use the transport of a verifier and a drafter. Latencies are one-way, of one tensor at a time, for at
    most 5 seconds per row; received tensors are compared to the sent ones.
    """
    wanted = _parse(sizes)
    # Imported here because importing torch takes seconds, which --help should not.
    from draftwire.model.devices import choose_device
    from draftwire_bench.transport.transport import TransportOptions, measure_transport

    options = TransportOptions(choose_device(sender_device), choose_device(receiver_device), wanted, repeats)
    console = report_console()
    with console.status("starting the receiver") as status:
        rows = measure_transport(options, status.update)
    console.print(_table(rows, f"{sender_device} to {receiver_device}: one-way, microseconds; all bytes as sent"))
    devices = {"sender_device": sender_device, "receiver_device": receiver_device}
    found = [asdict(row) | {"gb_per_s": row.gb_per_s} for row in rows]
    write_json(json_path, describe() | {"benchmark": "transport", **devices, "rows": found})


def _parse(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(|KiB|MiB)\s*", part)
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if not (8 <= size <= LARGEST and size % 4 == 0):
            raise InvalidArgumentError("sizes", part, f"allowed: multiples of 4 from 8 to {LARGEST}, as in 8KiB,1MiB")
        sizes.append(size)
    return sizes


def _size_text(size: int) -> str:
    for unit in ("MiB", "KiB"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}"
    return f"{size} B"


def _table(rows: Sequence[Row], title: str) -> Table:
    columns = ("tensor by", "message by", "size", "repeats", "median", "p99", "GB/s", "")
    table = make_table(title, columns, ["tensor by", "message by", ""])
    for row in rows:
        figures = (row.median_us, row.p99_us, row.gb_per_s)
        table.add_row(
            row.carrier,
            row.message_by,
            "" if row.num_bytes is None else _size_text(row.num_bytes),
            str(row.repeats or ""),
            *("" if figure is None else f"{figure:.3g}" if figure < 100 else f"{figure:.0f}" for figure in figures),
            row.missing and f"not available: {row.missing}",
        )
    return table
