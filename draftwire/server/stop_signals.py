"""The signals that end a service, and what they do while it is not serving."""

from __future__ import annotations

import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_at_signals() -> None:
    """Has each of them end this process at once. A container's first process does it by itself, with the status that a
    shell gives: the kernel spares it signals that have no handler."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end if is_first_process() else signal.SIG_DFL)


def is_first_process() -> bool:
    """Whether this is process 1 of a container."""
    return os.getpid() == 1


def _end(number: int, _: object) -> None:
    os._exit(128 + number)
