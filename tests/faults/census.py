"""What a process holds, counted again and again, and whether it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
# Share of a run that counts as warm-up: threads, arenas and caches reach their size.
WARM_UP = 0.25
# Memory may rise by so much over all that is judged, and over its second half, however long they are: the longer the
# run, the slower a leak that is found. What is in use wanders, and allocators take more by jumps: 1.1 MiB at most in
# what was judged of runs of 5 and 10 minutes, 0.8 in the second half. What each step leaves behind grows without a
# pause: one feature row of the demo pair, 1024 bytes, by 7 MiB in 15 minutes of 8 steps a second.
MAX_RISE_MIB = 4.0
MAX_LATE_RISE_MIB = 3.0
# Pools of bounded size, as the event loops' executors, start a thread when more of theirs than before are busy at once;
# one that is left behind by each fault is dozens.
MAX_MORE_THREADS = 4
# So long after a fault's end all that it ended is back.
SETTLED_S = 15.0
LEAST_SAMPLES = 12
LEAST_CALM_SAMPLES = 2


@dataclass(frozen=True)
class Census:
    """One process at one time."""

    seconds: float  # since the run began
    memory_mib: float  # resident and its own: shared memory is counted in `segments`
    fds: int
    threads: int
    segments: int  # mappings of shared memory: anonymous files and those of /dev/shm
    calm_s: float  # since the last fault ended, 0 while one lasts


def take_census(pid: int, seconds: float, calm_s: float) -> Census | None:
    """None when there is no such process."""
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
    """Whether one count of a process is flat."""

    what: str
    early: float
    late: float
    is_flat: bool


def judge(censuses: Sequence[Census]) -> list[Verdict]:
    """Judges what comes after the warm-up.

    Memory by the rise of a line through it between faults: while one lasts there may be features for another head. The
    other counts go up and down with connections that faults end, so they are compared when all are back: their lowest
    value then must be no higher in the second half than in the first; of threads, by `MAX_MORE_THREADS`.

    Raises
    ------
    ValueError
        When there are too few to judge.
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
    """By the rise of the least-squares line."""
    seconds = np.array([one.seconds for one in censuses])
    slope, start = np.polyfit(seconds - seconds[0], [one.memory_mib for one in censuses], 1)
    rise = float(slope * (seconds[-1] - seconds[0]))
    return Verdict(what, float(start), float(start) + rise, rise <= most)
