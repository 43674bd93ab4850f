"""The time between two forward passes: what both engines' threads do from a step's tokens to the next step.

    python -m draftwire_bench.timeline [--json FILE] -- draftwire bench serve --drafting on --concurrency 1,32 ...

Runs a command and records when selected methods of the services begin and end (hook/calls.py), by the monotonic clock,
which all processes of a host share. For each stretch of steps with drafts, and of steps without, prints the median way
of a step: the time of each mark after the step's tokens are on the verifier's host, and the time in the methods.
Announced steps have two ways: that of the drafts, which may begin shortly before, and that of the message. A record
takes a microsecond.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from draftwire_bench.environment import describe
from draftwire_bench.hook.calls import CALLS, DRAFTED, WAY, WAY_WITHOUT_DRAFTS, WAYS_BOTH_EARLY, WAYS_EARLY, Mark
from draftwire_bench.output import json_option, make_table, report_console, write_json

HOOK = Path(__file__).resolve().parent / "hook"
NAMES = [name for names in CALLS.values() for name in names]
# Steps that are further apart belong to different stretches, such as levels of load; short stretches are ignored.
GAP_S = 0.5
LEAST_STEPS = 50
# Maximum time between the arrival of a device's numbers and the use of its tokens.
LEAD_S = 0.3e-3


@click.command(context_settings={"allow_interspersed_args": False})
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(json_path: Path | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, print the time of its steps by part, and exit with COMMAND's status."""
    with tempfile.TemporaryDirectory() as directory:
        status = run_recorded(command, Path(directory))
        records = read(Path(directory))
    console = report_console()
    found = summaries(records)
    for summary in found:
        console.print(_table(summary))
    write_json(json_path, describe() | {"stretches": found})
    sys.exit(status)


def run_recorded(command: Sequence[str], directory: Path) -> int:
    """Run a command whose Python processes record their calls in `directory`; return its exit status.

    The processes import hook/sitecustomize.py at startup.
    """
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "DRAFTWIRE_TIMELINE": str(directory)}
    return subprocess.run(command, env=environment).returncode


def read(directory: Path) -> dict[str, np.ndarray]:
    """Return begin and end in seconds, [n, 2], of each method's calls in all processes, in order."""
    rows = [np.empty((0, 3), np.int64)]
    for path in directory.glob("*.records"):
        values = np.fromfile(path, np.int64)
        rows.append(values[1 : 1 + 3 * values[0]].reshape(-1, 3))
    all_rows = np.concatenate(rows)
    all_rows = all_rows[all_rows[:, 1].argsort()]
    return {name: all_rows[all_rows[:, 0] == number, 1:] * 1e-9 for number, name in enumerate(NAMES)}


def stretches(steps: np.ndarray) -> list[tuple[float, float]]:
    """Return (begin, end) in monotonic seconds of the middle half of each stretch of steps, in order."""
    parts = np.split(steps, np.flatnonzero(np.diff(steps) > GAP_S) + 1)
    return [(part[len(part) // 4], part[3 * len(part) // 4]) for part in parts if len(part) >= LEAST_STEPS]


def without_drafts(records: dict[str, np.ndarray]) -> np.ndarray:
    """Return the times of the tokens of steps without any drafting nearby, in order."""
    tokens, drafted = np.sort(_times(records, WAY[0])), np.sort(_times(records, DRAFTED))
    num_near = np.searchsorted(drafted, tokens + GAP_S) - np.searchsorted(drafted, tokens - GAP_S)
    return tokens[num_near == 0]


def ways(records: dict[str, np.ndarray]) -> tuple[tuple[Mark, ...], ...]:
    """Return the ways of steps with drafts that were recorded."""
    for found in (WAYS_BOTH_EARLY, WAYS_EARLY):
        if all(len(records[mark.call]) for mark in found[0]):
            return found
    return (WAY,)


def way(records: dict[str, np.ndarray], marks: Sequence[Mark], begin: float, end: float) -> list[float]:
    """Return the median seconds from a step's tokens to each mark; each mark is the first after the previous one."""
    tokens = _times(records, WAY[0])
    start = tokens[(tokens >= begin) & (tokens < end)]
    now = start - LEAD_S
    medians = []
    for mark in marks:
        times = np.append(np.sort(_times(records, mark)), np.nan)
        now = times[np.minimum(np.searchsorted(times[:-1], now), len(times) - 1)]
        medians.append(float(np.nanmedian(now - start)))
    return medians


def _times(records: dict[str, np.ndarray], mark: Mark) -> np.ndarray:
    """Return all monotonic times of a mark."""
    return records[mark.call][:, int(mark.end == "end")]


def summaries(records: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return for each stretch the number of steps, milliseconds per step, ways with the microseconds from the tokens to
    each mark, and calls per step and median microseconds of each method."""
    begun, undrafted = _times(records, WAY[-1]), without_drafts(records)
    marks = [mark for mark in WAY_WITHOUT_DRAFTS if len(records[mark.call])]  # no graphs on a CPU
    kinds = ((True, begun, ways(records)), (False, undrafted, [marks]))
    return [
        {"drafts": drafts, **_summary(records, steps, stretch, taken)}
        for drafts, steps, taken in kinds
        for stretch in stretches(steps)
    ]


def _summary(
    records: dict[str, np.ndarray],
    steps: np.ndarray,
    stretch: tuple[float, float],
    taken: Sequence[Sequence[Mark]],
) -> dict[str, Any]:
    begin, end = stretch
    count = int(((steps >= begin) & (steps < end)).sum())
    calls = {}
    for name, of_method in records.items():
        inside = of_method[(of_method[:, 0] >= begin) & (of_method[:, 0] < end)]
        if len(inside):
            median_us = 1e6 * float(np.median(inside[:, 1] - inside[:, 0]))
            calls[name] = {"a_step": len(inside) / count, "median_us": median_us}
    found = [
        [
            {"mark": f"{mark.call} {mark.end}", "us": 1e6 * median}
            for mark, median in zip(marks, way(records, marks, begin, end), strict=True)
        ]
        for marks in taken
    ]
    return {"steps": count, "ms_each": 1e3 * (end - begin) / count, "ways": found, "calls": calls}


def _table(summary: dict[str, Any]) -> Table:
    kind = "" if summary["drafts"] else ", no drafts"
    title = f"{summary['steps']} steps{kind}, {summary['ms_each']:.2f} ms each; microseconds"
    columns = ("mark or method", "from the tokens", "from the previous mark", "calls per step", "median")
    table = make_table(title, columns, ["mark or method"])
    for marks in summary["ways"]:
        before = 0.0
        for one in marks:
            table.add_row(one["mark"], f"{one['us']:.0f}", f"{one['us'] - before:.0f}")
            before = one["us"]
        table.add_section()
    for name, calls in summary["calls"].items():
        table.add_row(name, "", "", f"{calls['a_step']:.2f}", f"{calls['median_us']:.0f}")
    return table


if __name__ == "__main__":
    main()
