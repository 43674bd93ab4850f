"""Space for spans in a segment."""

from __future__ import annotations

import threading
from collections import deque

from draftwire.carriers.segment import ALIGNMENT, MAX_SPANS
from draftwire.errors import InvalidArgumentError


class Ring:
    """Hands out the space of a segment in order and takes it back in that order. May be used from several threads."""

    def __init__(self, size: int) -> None:
        """`size` of the segment, bytes; its first `ALIGNMENT` bytes are not handed out."""
        self._size = size
        self._lock = threading.Lock()
        self._next = ALIGNMENT  # where the next span's room begins
        self._generation = 0
        self._spans: deque[tuple[int, int]] = deque()  # (generation, where its room begins), oldest first

    def allocate(self, num_bytes: int) -> tuple[int, int] | None:
        """(generation, offset) of a new span; None when there is no room now, or MAX_SPANS are in use."""
        room = ALIGNMENT + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            begin = self._find(room) if len(self._spans) < MAX_SPANS else None
            if begin is None:
                return None
            self._generation += 1
            self._next = begin + room
            self._spans.append((self._generation, begin))
            return self._generation, begin + ALIGNMENT

    def _find(self, room: int) -> int | None:
        if not self._spans:
            return ALIGNMENT if ALIGNMENT + room <= self._size else None
        oldest = self._spans[0][1]
        if oldest < self._next:  # used: oldest .. next
            if self._next + room <= self._size:
                return self._next
            # What is used must not end where it begins: that would read as nothing used.
            return ALIGNMENT if ALIGNMENT + room < oldest else None
        return self._next if self._next + room < oldest else None

    def release(self, generation: int, name: str) -> None:
        """Takes back all spans up to `generation`, which the other side has read.

        Parameters
        ----------
        name
            Field name for errors.

        Raises
        ------
        InvalidArgumentError
            When there has been no such span, or it was taken back long ago.
        """
        with self._lock:
            oldest = self._spans[0][0] if self._spans else self._generation + 1
            if not oldest - 1 <= generation <= self._generation:
                allowed = f"allowed range [{oldest - 1}, {self._generation}]: spans that were sent, never falling"
                raise InvalidArgumentError(name, generation, allowed)
            while self._spans and self._spans[0][0] <= generation:
                self._spans.popleft()
