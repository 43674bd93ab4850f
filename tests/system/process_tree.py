"""The processes that a service starts, as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_for

from draftwire_bench.processes import ServiceProcess


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` has started, directly or indirectly."""
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
    """Return the only child that multiprocessing spawned; Python's resource tracker does not count."""
    (child,) = (pid for pid in descendants(process.pid) if parent_of(pid) == process.pid and is_spawned(pid))
    return child


def parent_of(pid: int) -> int:
    """Return the parent process of `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_spawned(pid: int) -> bool:
    """Return whether multiprocessing spawned the process."""
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def all_ending(process: ServiceProcess) -> Iterator[int]:
    """Yield the id of the spawned child; on exit, wait until all processes of the service have ended."""
    own = descendants(process.pid)
    yield spawned_child(process)
    wait_for(lambda: not process.running, "the service ended")
    wait_for(lambda: not any(map(is_running, own)), "its children ended")
