"""Output tokens per second over the last seconds."""

from __future__ import annotations

import time
from collections import deque

# Seconds over which the rate is measured, and seconds of one counter.
WINDOW_S = 5.0
_STEP_S = 0.1


class TokenRate:
    """Counts tokens and returns their rate over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()  # begin of a step of time, tokens in it
        self._total = 0

    def count(self, num_tokens: int) -> None:
        """Count tokens that arrive now."""
        now = time.monotonic()
        if self._counts and now < self._counts[-1][0] + _STEP_S:
            begin, before = self._counts[-1]
            self._counts[-1] = (begin, before + num_tokens)
        else:
            self._counts.append((now, num_tokens))
        self._total += num_tokens
        self._prune(now)

    @property
    def tokens_per_s(self) -> float:
        """Return the rate."""
        self._prune(time.monotonic())
        return self._total / WINDOW_S

    def _prune(self, now: float) -> None:
        while self._counts and self._counts[0][0] < now - WINDOW_S:
            self._total -= self._counts.popleft()[1]
