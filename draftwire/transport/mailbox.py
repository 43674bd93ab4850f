"""The mailbox of an engine's thread: items of other threads, and messages that other processes send directly."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items that any thread puts, and messages read from descriptors, for one thread, the owner.

    A message wakes the owner directly, with no thread in between. A message that was sent before an item was put is
    returned before this item. All methods but `put` and `leftovers` are called by the owner.
    """

    def __init__(self, awake_s: float = 0.0, poll: Callable[[], T | None] = lambda: None) -> None:
        """For `awake_s` seconds after its last item or message the owner polls instead of sleeping. A result of `poll`
        other than None counts as a message, but does not wake a sleeping owner."""
        self._awake_s = awake_s
        self._poll_more = poll
        self._awake_until = 0.0
        self._put: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._items: deque[T] = deque()
        self._messages: deque[T] = deque()
        self._readers: dict[int, Callable[[], Sequence[T] | None]] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._is_rung = False
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    def put(self, item: T) -> None:
        """Add an item; from any thread."""
        self._put.put(item)
        os.eventfd_write(self._bell, 1)

    def watch(self, fd: int, read: Callable[[], Sequence[T] | None]) -> None:
        """Call `read` when `fd` is readable: it returns messages, in order, or None when no more will come."""
        self._readers[fd] = read
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop reading from `fd`; call before `fd` is closed."""
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def get(self, timeout: float | None = None) -> T:
        """Return the next item or message within `timeout` seconds; None waits without limit.

        Raises:
            queue.Empty: If nothing arrived in time.
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
                self._note_bell(self._epoll.poll(left))

    def get_nowait(self) -> T:
        """Return the next item or message; raises queue.Empty when there is none."""
        return self.get(0)

    @property
    def has_more(self) -> bool:
        """Return whether the last poll found more items than were taken; makes no system call."""
        return bool(self._messages or self._items)

    def wait(self, timeout: float) -> bool:
        """Return whether there is an item or a message within `timeout` seconds, to about 50 us."""
        self._collect()
        if not self.has_more:
            # epoll waits for whole milliseconds.
            select.select([self._epoll.fileno()], [], [], timeout)
            self._collect()
        return self.has_more

    def leftovers(self) -> Iterator[T]:
        """Return all items; from any thread, after the owner has ended."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._items.popleft()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._put.get_nowait()

    def _collect(self) -> None:
        """Take the items before the messages: a message that was sent before an item was put has arrived by now."""
        if self._is_rung:
            os.eventfd_read(self._bell)
            self._is_rung = False
        while not self._put.empty():
            self._items.append(self._put.get())
        ready = self._epoll.poll(0)
        self._note_bell(ready)
        for fd, _ in ready:
            if fd != self._bell:
                messages = self._readers[fd]()
                if messages is None:
                    self.unwatch(fd)
                else:
                    self._messages.extend(messages)
        if not self._messages and (seen := self._poll_more()) is not None:
            self._messages.append(seen)

    def _note_bell(self, ready: Sequence[tuple[int, int]]) -> None:
        self._is_rung = self._is_rung or any(fd == self._bell for fd, _ in ready)
