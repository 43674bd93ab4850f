"""How fast the queue moves, for clients that found it full."""

from __future__ import annotations

import random
import time
from collections import deque

# The requests that have ended in so many seconds tell the pace.
WINDOW_S = 10.0
# What clients are asked to wait.
RETRY_S = (0.1, 30.0)


class QueuePace:
    """Counts requests that leave, and says when half of a full queue will have moved on."""

    def __init__(self, max_queue: int) -> None:
        self._half = max(1.0, max_queue / 2)
        self._ends: deque[float] = deque()

    def count_end(self) -> None:
        """A request has left."""
        now = time.monotonic()
        self._ends.append(now)
        self._prune(now)

    def retry_after_s(self) -> float:
        """Seconds after which it is worth to come again; drawn anew each time, so that clients do not come together."""
        self._prune(time.monotonic())
        low, high = RETRY_S
        seconds = self._half * WINDOW_S / len(self._ends) if self._ends else high
        return min(max(seconds, low), high) * random.uniform(0.75, 1.25)

    def _prune(self, now: float) -> None:
        while self._ends and self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
