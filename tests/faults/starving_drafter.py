"""`draftwire` whose draft engine fails to allocate memory in every 20th batch, from SIGUSR1 until SIGUSR2."""

import itertools
import signal
import threading
from typing import Any

import torch

from drafter_service.engine.scheduler import Batch, Scheduler
from draftwire_cli.main import main

BATCHES = 20
MORE_THAN_THERE_IS = 1 << 60

next_batch = Scheduler.next_batch
is_starving = threading.Event()
count = itertools.count(1)


def starve(number: int, _frame: object) -> None:
    """Switch the failures on at SIGUSR1 and off at SIGUSR2."""
    if number == signal.SIGUSR1:
        is_starving.set()
    else:
        is_starving.clear()


def next_batch_or_fail(scheduler: Scheduler, *arguments: Any) -> Batch:
    """Return the scheduler's next batch, or fail to allocate memory after its rows were taken."""
    batch = next_batch(scheduler, *arguments)
    if is_starving.is_set() and next(count) % BATCHES == 0:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
    return batch


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, starve)
    signal.signal(signal.SIGUSR2, starve)
    Scheduler.next_batch = next_batch_or_fail
    main()
