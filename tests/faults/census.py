"""Repeated counts of the memory, file descriptors and threads of a process, and a test for growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
# Share of a run that is warm-up, in which threads, arenas and caches reach their size.
WARM_UP = 0.25
# Maximum rise of memory after the warm-up, and in the second half of that time. The limits do not depend on the
# duration, so longer runs find slower leaks. Memory in use varies, and allocators grow by jumps: at most 1.1 MiB after
# the warm-up in runs of 5 and 10 minutes, 0.8 MiB in the second half. A leak in each step grows steadily: one feature
# row of the demo pair, 1024 bytes, is 7 MiB in 15 minutes at 8 steps/s.
MAX_RISE_MIB = 4.0
MAX_LATE_RISE_MIB = 3.0
# Bounded pools, such as the event loops' executors, start a thread when more threads than before are busy at once. One
# leaked thread per fault would be dozens.
MAX_MORE_THREADS = 4
# Seconds after a fault's end within which everything that the fault ended is restored.
SETTLED_S = 15.0
LEAST_SAMPLES = 12
LEAST_CALM_SAMPLES = 2


@dataclass(frozen=True)
class Census:
    """Counts of one process at one time."""

    seconds: float  # since the run began
    memory_mib: float  # private resident memory; `segments` counts shared memory
    fds: int
    threads: int
    segments: int  # mappings of shared memory: anonymous files and those of /dev/shm
    calm_s: float  # since the last fault ended; 0 during a fault


def take_census(pid: int, seconds: float, calm_s: float) -> Census | None:
    """Return the counts of a process, or None if the process does not exist."""
    process = Path("/proc") / str(pid)
    try:
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        maps = (process / "maps").read_text()
        return Census(
            seconds,
            int(fields["RssAnon"].split()[0]) * 1024 / MIB,
            sum(1 for _ in (process / "fd").iterdir()),
            int(fields["Threads"]),
            maps.count("/memfd:") + maps.count("/dev/shm/"),
            calm_s,
        )
    except (OSError, KeyError):
        return None


@dataclass(frozen=True)
class Verdict:
    """The verdict whether one count of a process is flat, that is, does not grow."""

    what: str
    early: float
    late: float
    is_flat: bool


def judge(censuses: Sequence[Census]) -> list[Verdict]:
    """Return verdicts on the counts after the warm-up.

    Memory is judged by the rise of a line through samples between faults; during a fault there may be features for
    another head. The other counts vary with connections that faults end, so they are compared long after faults. Their
    minimum must not be higher in the second half than in the first, except for `MAX_MORE_THREADS` threads.

    Raises
    ------
    ValueError
        If there are too few samples.
    """
    judged = [one for one in censuses if one.seconds >= WARM_UP * censuses[-1].seconds]
    middle = (judged[0].seconds + judged[-1].seconds) / 2
    halves = [one for one in judged if one.seconds < middle], [one for one in judged if one.seconds >= middle]
    between = [[one for one in half if one.calm_s > 0] for half in halves]
    if min(map(len, between)) < LEAST_SAMPLES:
        raise ValueError(f"{[len(one) for one in between]} samples between faults, {LEAST_SAMPLES} a half are needed")
    verdicts = [_judge_memory("memory, MiB", [*between[0], *between[1]], MAX_RISE_MIB)]
    verdicts.append(_judge_memory("memory of the second half, MiB", between[1], MAX_LATE_RISE_MIB))
    calm = [[one for one in half if one.calm_s >= SETTLED_S] for half in halves]
    if min(map(len, calm)) < LEAST_CALM_SAMPLES:
        raise ValueError(
            f"{[len(one) for one in calm]} samples far from faults, {LEAST_CALM_SAMPLES} a half are needed"
        )
    counts: list[tuple[str, Callable[[Census], int], int]] = [
        ("file descriptors", lambda one: one.fds, 0),
        ("threads", lambda one: one.threads, MAX_MORE_THREADS),
        ("shared-memory segments", lambda one: one.segments, 0),
    ]
    for what, count, more in counts:
        early, late = (min(map(count, half)) for half in calm)
        verdicts.append(Verdict(what, early, late, late <= early + more))
    return verdicts


def _judge_memory(what: str, censuses: Sequence[Census], most: float) -> Verdict:
    """Judge the rise of the least-squares line."""
    seconds = np.array([one.seconds for one in censuses])
    slope, start = np.polyfit(seconds - seconds[0], [one.memory_mib for one in censuses], 1)
    rise = float(slope * (seconds[-1] - seconds[0]))
    return Verdict(what, float(start), float(start) + rise, rise <= most)
