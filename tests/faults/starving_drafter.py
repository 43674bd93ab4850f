"""`draftwire` whose draft engine asks for more memory than there is, in some batches from SIGUSR1 until SIGUSR2."""

import itertools
import signal
import threading
from typing import Any

import torch

from drafter_service.engine.engine import DraftEngine
from draftwire_cli.main import main

BATCHES = 20
MORE_THAN_THERE_IS = 1 << 60

feed = DraftEngine._feed
is_starving = threading.Event()
count = itertools.count(1)


def starve(number: int, _frame: object) -> None:
    """Handles both signals."""
    if number == signal.SIGUSR1:
        is_starving.set()
    else:
        is_starving.clear()


def feed_or_fail(engine: DraftEngine, *arguments: Any) -> None:
    """What the engine runs in the middle of every batch."""
    if is_starving.is_set() and next(count) % BATCHES == 0:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
    feed(engine, *arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, starve)
    signal.signal(signal.SIGUSR2, starve)
    DraftEngine._feed = feed_or_fail
    main()
