"""Every step, plan, message and answer of a verifier's engine, while a command runs its services.

    python -m draftwire_bench.pacing_record --output record.jsonl.gz -- python -m draftwire_bench.far_drafter ...

Records in the verifier's engine process (hook/pacing.py), one JSON line each: steps as `Drafting` counts
them; what each drafter's policy chose after a step, with the throughput that it measured; messages to drafters, and
their answers, with the `number` of the message. Times are the monotonic clock's, which is one for all processes of a
host, `at` that of the record. Then it prints how many there were in each stretch. The file grows every half second, so
that a command that is cut off leaves one.
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

# Events further apart than this belong to different stretches, as levels of load do.
GAP_S = 0.5
COLUMNS = ("steps", "plans", "plans with drafts", "messages", "rows", "bytes", "answers")


class Stretch(NamedTuple):
    """What there was between two pauses, by column; monotonic seconds."""

    begin: float
    end: float
    counts: Counter[str]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Compressed if .gz.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(output: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND, record its verifier's pacing, print the number of records, and exit with its status."""
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
    """Return events of some kinds, in order."""
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
