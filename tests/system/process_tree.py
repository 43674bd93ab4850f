"""The processes that a service starts, as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_for

from draftwire_bench.processes import ServiceProcess


def descendants(pid: int) -> list[int]:
    """Processes that come from `pid`, itself left out."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(name.split()[0])] = int(rest.split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def spawned_child(process: ServiceProcess) -> int:
    """The only child that was spawned, for which Python's own helper is none."""
    (child,) = (pid for pid in descendants(process.pid) if parent_of(pid) == process.pid and is_spawned(pid))
    return child


def parent_of(pid: int) -> int:
    """The process that has started `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_spawned(pid: int) -> bool:
    """Whether multiprocessing has started it."""
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_running(pid: int) -> bool:
    """Whether it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def all_ending(process: ServiceProcess) -> Iterator[int]:
    """Gives the id of the spawned child; in the end no process of the service is to be left."""
    own = descendants(process.pid)
    yield spawned_child(process)
    wait_for(lambda: not process.running, "the service ended")
    wait_for(lambda: not any(map(is_running, own)), "its children ended")
