"""What a process holds, counted again and again, and whether it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
# Share of a run that counts as warm-up: threads, arenas and caches reach their size.
WARM_UP = 0.25
# Memory may rise by so much over what is judged. Allocators keep a few MiB more or less; a leak of one feature row
# a step, the smallest thing that a step makes, is several times as much in 15 minutes.
MAX_RISE_MIB = 12.0
# Pools of bounded size, as the event loops' executors, start a thread when more of theirs than before are busy at once;
# one that is left behind by each fault is dozens.
MAX_MORE_THREADS = 4
LEAST_SAMPLES = 12


@dataclass(frozen=True)
class Census:
    """One process at one time."""

    seconds: float  # since the run began
    memory_mib: float  # resident and its own: shared memory is counted in `segments`
    fds: int
    threads: int
    segments: int  # mappings of shared memory: anonymous files and those of /dev/shm


def take_census(pid: int, seconds: float) -> Census | None:
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

    Memory by the rise of a line through it. The other counts go up and down with connections that faults end and
    requests that come and go, so that their peaks tell of chance; what is never given back raises their lowest value,
    which must be no higher in the last third than in the first; of threads, by `MAX_MORE_THREADS`.

    Raises
    ------
    ValueError
        When there are too few to judge.
    """
    judged = [one for one in censuses if one.seconds >= WARM_UP * censuses[-1].seconds]
    if len(judged) < LEAST_SAMPLES:
        raise ValueError(f"{len(judged)} samples after the warm-up, at least {LEAST_SAMPLES} are needed")
    seconds = np.array([one.seconds for one in judged])
    slope, start = np.polyfit(seconds - seconds[0], [one.memory_mib for one in judged], 1)
    rise = float(slope * (seconds[-1] - seconds[0]))
    verdicts = [Verdict("memory, MiB", float(start), float(start) + rise, rise <= MAX_RISE_MIB)]
    third = len(judged) // 3
    counts: list[tuple[str, Callable[[Census], int], int]] = [
        ("file descriptors", lambda one: one.fds, 0),
        ("threads", lambda one: one.threads, MAX_MORE_THREADS),
        ("shared-memory segments", lambda one: one.segments, 0),
    ]
    for what, count, more in counts:
        early, late = min(map(count, judged[:third])), min(map(count, judged[-third:]))
        verdicts.append(Verdict(f"{what}, lowest", early, late, late <= early + more))
    return verdicts
