"""The signals that end a service, and their effect while the service does not serve."""

from __future__ import annotations

import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_at_signals() -> None:
    """Let each of the signals end this process at once. Process 1 of a container exits in a handler, with a shell's
    status, because the kernel ignores its signals without a handler."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end if is_first_process() else signal.SIG_DFL)


def is_first_process() -> bool:
    """Return whether this is process 1 of a container."""
    return os.getpid() == 1


def _end(number: int, _: object) -> None:
    os._exit(128 + number)
