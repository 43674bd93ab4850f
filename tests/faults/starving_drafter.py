"""`draftwire drafter` whose engine asks for more memory than there is: from SIGUSR1 on in some batches, until SIGUSR2."""

import itertools
import signal
from typing import Any

import torch

from draftwire.cli.main import main
from drafter_service.engine import DraftEngine

BATCHES = 20
MORE_THAN_THERE_IS = 1 << 60

compute = DraftEngine._feed
is_starving = False
count = itertools.count(1)


def starve(number: int, _frame: object) -> None:
    global is_starving  # a signal's handler has nowhere else to put it
    is_starving = number == signal.SIGUSR1


def iterate(engine: DraftEngine, *arguments: Any) -> None:
    """As the engine's own, in the middle of a batch."""
    if is_starving and next(count) % BATCHES == 0:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
    compute(engine, *arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, starve)
    signal.signal(signal.SIGUSR2, starve)
    DraftEngine._feed = iterate
    main()
