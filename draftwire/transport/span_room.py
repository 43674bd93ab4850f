"""Space for spans in a segment."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from draftwire.contract.errors import InvalidArgumentError
from draftwire.transport.segment import ALIGNMENT, MAX_SPANS


@dataclass(eq=False)
class Span:
    """An allocated part of a segment."""

    offset: int  # bytes
    generation: int = 0  # 0 before the span is numbered
    is_given_up: bool = False


class SpanRoom:
    """Allocates the space of a segment in order and frees it in this order; thread-safe.

    Spans are numbered when they are sent, so that a span may be sent later than spans that were begun after it, or
    never.
    """

    def __init__(self, size: int) -> None:
        """`size` of the segment, bytes; the first `ALIGNMENT` bytes are reserved."""
        self._size = size
        self._lock = threading.Lock()
        self._next = ALIGNMENT  # where the next span's room begins, `ALIGNMENT` bytes before the span
        self._generation = 0
        self._released = 0  # generation
        self._spans: deque[Span] = deque()  # spans in use, in the order of their offsets

    def allocate(self, num_bytes: int) -> Span | None:
        """Return a new span; None when there is no room now, or MAX_SPANS are in use."""
        room = ALIGNMENT + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            begin = self._find(room) if len(self._spans) < MAX_SPANS else None
            if begin is None:
                return None
            self._next = begin + room
            span = Span(begin + ALIGNMENT)
            self._spans.append(span)
            return span

    def _find(self, room: int) -> int | None:
        if not self._spans:
            return ALIGNMENT if ALIGNMENT + room <= self._size else None
        oldest = self._spans[0].offset - ALIGNMENT
        if oldest < self._next:  # used: oldest .. next
            if self._next + room <= self._size:
                return self._next
            # The used part must not end where it begins, which would mean that nothing is used.
            return ALIGNMENT if ALIGNMENT + room < oldest else None
        return self._next if self._next + room < oldest else None

    def number(self, span: Span) -> int:
        """Give the next generation to a span that is to be sent."""
        with self._lock:
            self._generation += 1
            span.generation = self._generation
            return span.generation

    def unnumber(self, span: Span) -> None:
        """Take the last generation back, which was not sent."""
        with self._lock:
            assert span.generation == self._generation
            self._generation, span.generation = self._generation - 1, 0

    def give_up(self, span: Span) -> None:
        """Free a span without a generation, which is not sent and no longer written."""
        with self._lock:
            span.is_given_up = True
            self._take_back()

    def release(self, generation: int, name: str) -> None:
        """Free all spans up to `generation`, which the other side has read.

        Args:
            name: Field name for errors.

        Raises:
            InvalidArgumentError: If no such span was sent, or it was freed long ago.
        """
        with self._lock:
            if not self._released <= generation <= self._generation:
                allowed = f"allowed range [{self._released}, {self._generation}]: spans that were sent, never falling"
                raise InvalidArgumentError(name, generation, allowed)
            self._released = generation
            self._take_back()

    def _take_back(self) -> None:
        """Free the room of released spans in order; a span waits for the spans before it."""
        spans = self._spans
        while spans and (spans[0].is_given_up or 0 < spans[0].generation <= self._released):
            spans.popleft()
