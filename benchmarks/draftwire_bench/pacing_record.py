"""Records every step, plan, message and answer of a verifier's engine while a command runs the services.

    python -m draftwire_bench.pacing_record --output record.jsonl.gz -- python -m draftwire_bench.far_drafter ...

The verifier's engine process (hook/pacing.py) writes JSON lines: steps as `Drafting` counts them; the choice of each
drafter's policy after a step with the measured throughput; messages to drafters, and answers with the `number` of the
message. Times are of the monotonic clock, which all processes of a host share; `at` is the time of the record. Prints
the number of records in each stretch. The file is written every half second, so an interrupted command leaves a record.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from draftwire_bench.watched import run_watched

# Events that are further apart belong to different stretches, such as levels of load.
GAP_S = 0.5
COLUMNS = ("steps", "plans", "plans with drafts", "messages", "rows", "bytes", "answers")


class Stretch(NamedTuple):
    """The counts between two pauses by column, and the monotonic times in seconds."""

    begin: float
    end: float
    counts: Counter[str]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Compressed if .gz.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(output: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND, record its verifier's pacing, print the number of records, and exit with the command's status."""
    output.write_bytes(b"")
    status = run_watched(command, "DRAFTWIRE_PACING_RECORD", output.resolve())
    table = Table(box=SIMPLE)
    for column in ("begin, s", "end, s", *COLUMNS):
        table.add_column(column, justify="right")
    found = [stretch for stretch in stretches(read(output)) if stretch.counts["steps"]]
    for begin, end, counts in found:
        seconds = [f"{time - found[0].begin:.1f}" for time in (begin, end)]
        table.add_row(*seconds, *(f"{counts[column]}" for column in COLUMNS))
    Console(width=max(Console().width, 100)).print(table)
    sys.exit(status)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a record."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def stretches(events: Iterable[Mapping[str, Any]]) -> list[Stretch]:
    """Group events into stretches, in order."""
    found: list[Stretch] = []
    for event in events:
        at, kind = event["at"], event["event"]
        if not found or at > found[-1].end + GAP_S:
            found.append(Stretch(at, at, Counter()))
        found[-1] = found[-1]._replace(end=at)
        found[-1].counts[f"{kind}s"] += 1
        if kind == "plan":
            found[-1].counts["plans with drafts"] += event["num_drafts"] > 0
        elif kind == "message":
            found[-1].counts.update(rows=event["rows"], bytes=event["num_bytes"])
    return found


if __name__ == "__main__":
    main()
