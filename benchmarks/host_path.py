"""What Python takes of both engines' threads between a step's tokens and the next pass, with no device at work.

    python -m benchmarks.host_path [--sequences 1,32,64] [--steps 300] [--wait-ms 5]

The services' own code takes steps of so many sequences, of which nothing is computed (`rehearsal.py` of both). Medians
in microseconds:

- busy: step after step;
- waited: after the thread has looked for messages for `--wait-ms`, as it does while a pass runs; the drafter has
  prepared its batch before that;
- rehearsed: the same, but from shortly before the end on it goes through steps of another engine, as
  `draftwire.practice` has it.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Sequence
from itertools import islice

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafter_service.rehearsal import Rehearsal as DraftersRehearsal
from draftwire.cli.bench_options import Numbers
from draftwire.practice import BEFORE_S, QUIET_S, Practice
from verifier_service.rehearsal import Rehearsal as VerifiersRehearsal

_Engine = DraftersRehearsal | VerifiersRehearsal


@click.command()
@click.option("--sequences", type=Numbers(int), default="1,32,64", show_default=True)
@click.option("--steps", default=300, show_default=True, type=click.IntRange(10))
@click.option("--wait-ms", default=5.0, show_default=True, type=click.FloatRange(2.0))
@torch.inference_mode()
def main(sequences: Sequence[int], steps: int, wait_ms: float) -> None:
    """Measures and prints."""
    console = Console()
    for name, kind in (("verifier", VerifiersRehearsal), ("drafter", DraftersRehearsal)):
        for count in sequences:
            columns = [
                measure(kind(count), steps),
                measure(kind(count), steps, wait_ms / 1e3),
                measure(kind(count), steps, wait_ms / 1e3, kind()),
            ]
            table = Table(f"{name}, {count}", "busy", "waited", "rehearsed", title="microseconds")
            for part, *medians in zip(kind.parts, *columns, strict=True):
                table.add_row(part, *(f"{1e6 * median:.0f}" for median in medians))
            table.add_section()
            table.add_row("all", *(f"{1e6 * sum(column):.0f}" for column in columns))
            console.print(table)


def measure(path: _Engine, steps: int, wait_s: float = 0.0, other: _Engine | None = None) -> list[float]:
    """Median seconds of each part."""
    practice = None if other is None else Practice(other, wait_s)
    taken = []
    for _ in range(steps):
        path.prepare()
        pieces = path.run()
        marks = list(islice(pieces, path.num_marks_before_wait))
        _wait(time.monotonic() + wait_s, practice)
        marks += pieces
        taken.append(np.diff([mark for mark in marks if mark is not None]))
    return [statistics.median(part) for part in zip(*taken[steps // 10 :], strict=True)]


def _wait(end: float, practice: Practice | None) -> None:
    """Looks for messages, of which there are none, up to a monotonic time."""
    with select.epoll() as poll:
        while (now := time.monotonic()) < end:
            poll.poll(0)
            if practice is not None and end - BEFORE_S <= now < end - QUIET_S:
                practice.go_on()


if __name__ == "__main__":
    main()
