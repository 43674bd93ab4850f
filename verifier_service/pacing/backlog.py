"""Number of prompt and backlog rows per message, chosen so that they delay neither drafts nor steps."""

from __future__ import annotations

import math

# Bytes of backlog rows in one message: minimum, initial value over a network, and maximum. The host copies messages
# over a network, and copies of more than a few MiB delay launches.
LEAST_BYTES, FIRST_BYTES, MOST_BYTES = 128 * 1024, 3 * 512 * 1024, 16 * 1024 * 1024
# Factors after an answer in time and after a late answer.
GROW, SHRINK = 1.25, 0.7
# Minimum seconds between messages while sequences catch up: each takes the engine's thread about 2 ms.
CATCH_UP_EVERY_S = 8e-3


class Backlog:
    """Backlog messages to one drafter: at most one is unanswered, and its size depends on earlier answer times."""

    def __init__(self, *, is_local: bool) -> None:
        """`is_local`: whether features travel through shared memory."""
        self._num_bytes = float(MOST_BYTES if is_local else FIRST_BYTES)
        self._sent_at = -math.inf
        self._awaited: int | None = None  # number of the unanswered backlog message

    @property
    def is_busy(self) -> bool:
        """Return whether a backlog message is unanswered."""
        return self._awaited is not None

    def may_send(self, now: float) -> bool:
        """Return whether a backlog message may be sent while no drafts are requested."""
        return not self.is_busy and now >= self._sent_at + CATCH_UP_EVERY_S

    def rows(self, row_bytes: int) -> int:
        """Return the maximum number of backlog rows in a message now."""
        return 0 if self.is_busy else max(1, int(self._num_bytes) // row_bytes)

    def count_sent(self, now: float, number: int) -> None:
        """Count a backlog message; `number` counts all messages to the drafter."""
        self._sent_at, self._awaited = now, number

    def note_answer(self, number: int) -> None:
        """Record the answer to any message, which also answers all earlier messages."""
        if self._awaited is not None and number >= self._awaited:
            self._awaited = None

    def learn(self, num_bytes: int, answer_s: float, in_time_s: float) -> None:
        """Update the size from the answer to a message of `num_bytes`; after `in_time_s` seconds it is late."""
        if answer_s > in_time_s:
            self._num_bytes = max(SHRINK * self._num_bytes, LEAST_BYTES)
        elif 2 * num_bytes >= self._num_bytes:  # smaller messages say nothing about this size
            self._num_bytes = min(GROW * self._num_bytes, MOST_BYTES)
