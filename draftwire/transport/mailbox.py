"""What an engine's thread waits for: items of other threads, and messages that other processes send it directly."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items that any thread puts, and messages read from descriptors, for one thread, the owner.

    Whoever sends a message wakes the owner, with no thread between the two. A message that was sent before an item was
    put comes before that item. All methods but `put` and `leftovers` are called by the owner.
    """

    def __init__(self, awake_s: float = 0.0, look: Callable[[], T | None] = lambda: None) -> None:
        """For `awake_s` seconds after it got something the owner looks again and again instead of sleeping, so that
        nobody has to wake it. What it sees by `look` counts as a message: nothing wakes it for that."""
        self._awake_s = awake_s
        self._look = look
        self._awake_until = 0.0
        self._put: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._items: deque[T] = deque()
        self._messages: deque[T] = deque()
        self._readers: dict[int, Callable[[], Sequence[T] | None]] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_rung = False
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)

    def put(self, item: T) -> None:
        """Adds an item; from any thread."""
        self._put.put(item)
        os.eventfd_write(self._bell, 1)

    def watch(self, fd: int, read: Callable[[], Sequence[T] | None]) -> None:
        """Calls `read` when `fd` is readable: it returns messages, in order, or None when no more will come."""
        self._readers[fd] = read
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Reads from `fd` no more, if it still did; to be called before it is closed."""
        if self._readers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def get(self, timeout: float | None = None) -> T:
        """The next item or message, within so many seconds; None waits for as long as it takes.

        Raises
        ------
        queue.Empty
            When there is none in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._collect()
            if self.has_more:
                self._awake_until = time.monotonic() + self._awake_s
                return (self._messages or self._items).popleft()
            now = time.monotonic()
            left = None if deadline is None else deadline - now
            if left is not None and left <= 0:
                raise queue.Empty
            if now >= self._awake_until:
                self._note_bell(self._poll.poll(left))

    def get_nowait(self) -> T:
        """The next item or message; raises queue.Empty when there is none."""
        return self.get(0)

    @property
    def has_more(self) -> bool:
        """Whether the last look found more than has been taken; to look costs calls of the system."""
        return bool(self._messages or self._items)

    def wait(self, timeout: float) -> bool:
        """Whether there is an item or a message, now or within so many seconds, to some 50 us exactly."""
        self._collect()
        if not self.has_more:
            # epoll itself waits for whole milliseconds.
            select.select([self._poll.fileno()], [], [], timeout)
            self._collect()
        return self.has_more

    def leftovers(self) -> Iterator[T]:
        """Takes the items that are there; from any thread, once the owner has ended."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._items.popleft()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._put.get_nowait()

    def _collect(self) -> None:
        """Takes the items first: what was sent before one of them was put is there by now."""
        if self._is_rung:
            os.eventfd_read(self._bell)
            self._is_rung = False
        while not self._put.empty():
            self._items.append(self._put.get())
        ready = self._poll.poll(0)
        self._note_bell(ready)
        for fd, _ in ready:
            if fd != self._bell:
                messages = self._readers[fd]()
                if messages is None:
                    self.unwatch(fd)
                else:
                    self._messages.extend(messages)
        if not self._messages and (seen := self._look()) is not None:
            self._messages.append(seen)

    def _note_bell(self, ready: Sequence[tuple[int, int]]) -> None:
        self._is_rung = self._is_rung or any(fd == self._bell for fd, _ in ready)
