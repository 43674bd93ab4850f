"""The retry delay of clients that found the queue full."""

from __future__ import annotations

import random
import time
from collections import deque

# Requests that ended within this many seconds count.
WINDOW_S = 10.0
# Least and most seconds of the delay.
RETRY_S = (0.1, 30.0)


class RetryAfterEstimator:
    """Counts requests that end, and estimates when half of a full queue will have been admitted."""

    def __init__(self, max_queue: int) -> None:
        self._half = max(1.0, max_queue / 2)
        self._ends: deque[float] = deque()

    def count_end(self) -> None:
        """Count a request that ends now."""
        now = time.monotonic()
        self._ends.append(now)
        self._prune(now)

    def retry_after_s(self) -> float:
        """Return the seconds after which a client should retry; random, so that clients do not retry together."""
        self._prune(time.monotonic())
        low, high = RETRY_S
        seconds = self._half * WINDOW_S / len(self._ends) if self._ends else high
        return min(max(seconds, low), high) * random.uniform(0.75, 1.25)

    def _prune(self, now: float) -> None:
        while self._ends and self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
