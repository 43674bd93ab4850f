"""How many rows of prompts and histories go in one message, so that they hold up neither drafts nor steps."""

from __future__ import annotations

import math

# Bytes of such rows in one message: at least, at first over a network, and at most. The host copies what goes over a
# network, and steps are launched late behind copies of more than a few MiB.
LEAST_BYTES, FIRST_BYTES, MOST_BYTES = 128 * 1024, 3 * 512 * 1024, 16 * 1024 * 1024
# Growth after a message that was answered in time, and shrinking after one that was not.
GROW, SHRINK = 1.25, 0.7
# While sequences catch up a message goes no more often than this: each takes the engine's thread some 2 ms.
CATCH_UP_EVERY_S = 8e-3


class Backlog:
    """Of one drafter: a message of such rows goes when the one before is answered, and its size follows the answers."""

    def __init__(self, *, is_local: bool) -> None:
        """`is_local`: whether features travel through shared memory."""
        self._num_bytes = float(MOST_BYTES if is_local else FIRST_BYTES)
        self._sent_at = -math.inf
        self._awaited: int | None = None  # number of the message that is not answered yet

    @property
    def is_busy(self) -> bool:
        """Return whether a message of such rows is not answered yet."""
        return self._awaited is not None

    def may_send(self, now: float) -> bool:
        """Return whether a message may go while nothing else is sent."""
        return not self.is_busy and now >= self._sent_at + CATCH_UP_EVERY_S

    def rows(self, row_bytes: int) -> int:
        """Return how many rows may go in a message now."""
        return 0 if self.is_busy else max(1, int(self._num_bytes) // row_bytes)

    def count_sent(self, now: float, number: int) -> None:
        """Count a message of such rows; `number` counts all messages to the drafter."""
        self._sent_at, self._awaited = now, number

    def note_answer(self, number: int) -> None:
        """Note the answer to any message, which answers those before it too."""
        if self._awaited is not None and number >= self._awaited:
            self._awaited = None

    def learn(self, num_bytes: int, answer_s: float, in_time_s: float) -> None:
        """Learn from the answer to a message of so many bytes, which is in time within `in_time_s`."""
        if answer_s > in_time_s:
            self._num_bytes = max(SHRINK * self._num_bytes, LEAST_BYTES)
        elif 2 * num_bytes >= self._num_bytes:  # less shows nothing
            self._num_bytes = min(GROW * self._num_bytes, MOST_BYTES)
