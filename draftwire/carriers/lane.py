"""Messages between the engines of two processes of one host."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time

# A message that is larger goes another way. Steps and drafts whose tensors are in shared memory take a few KiB.
MAX_MESSAGE_BYTES = 128 * 1024
# Messages taken at once, so that a peer that sends without end keeps nobody from other work.
MAX_MESSAGES = 64
# Linux's number of the option, which Python's socket module does not name before 3.14, and of what it sends along.
_TIMESTAMPS = 35
_TIMESTAMP = struct.Struct("@ll")  # of CLOCK_REALTIME: seconds, nanoseconds
_TIMESTAMP_ROOM = socket.CMSG_SPACE(_TIMESTAMP.size)


class Lane:
    """One end of a connected socket of type SOCK_SEQPACKET. Nothing ever waits.

    A thread that waits for it is woken by the peer's `send`: between two engines there is no other thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # No room for anything else: a peer could send open files along, which would stay open here.
        self._told_bytes = 0
        with contextlib.suppress(OSError):  # a kernel without them: a message then comes when it is read
            connection.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
            self._told_bytes = _TIMESTAMP_ROOM
        self._socket = connection
        self._buffer = bytearray(MAX_MESSAGE_BYTES + 1)
        self._empty_at = -math.inf  # monotonic time at which there was no message

    def fileno(self) -> int:
        """Readable when there are messages, or when the peer is gone."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Sends a message whole; False when it is too large, when too many are unread, or when the peer is gone."""
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> list[bytes]:
        """As `receive_timed`, without the times."""
        return [message for message, _ in self.receive_timed()]

    def receive_timed(self) -> list[tuple[bytes, float]]:
        """The messages that are there, at most MAX_MESSAGES, and the monotonic time at which each of them came.

        A thread that was busy then reads it later. What it says of the peer and of the way there is when it came.

        Raises
        ------
        ConnectionError
            When the peer is gone or sends what no peer does, and all before it has been received.
        """
        messages: list[tuple[bytes, float]] = []
        while len(messages) < MAX_MESSAGES:
            try:
                size, told, _, _ = self._socket.recvmsg_into([self._buffer], self._told_bytes)
            except BlockingIOError:
                self._empty_at = time.monotonic()
                break
            except OSError:
                size = 0
            if not 0 < size <= MAX_MESSAGE_BYTES:
                if messages:
                    break
                raise ConnectionError("the peer is gone" if size == 0 else "a message is too large")
            messages.append((bytes(memoryview(self._buffer)[:size]), max(_arrival(told), self._empty_at)))
        return messages

    def close(self) -> None:
        """Ends it for both sides."""
        self._socket.close()


def _arrival(told: list[tuple[int, int, bytes]]) -> float:
    """Monotonic time at which a message came, from what the kernel tells with it; now, where it tells nothing.

    Its clock is another one, which may be set in between.
    """
    now = time.monotonic()
    for _, kind, data in told:
        if kind == _TIMESTAMPS and len(data) == _TIMESTAMP.size:
            seconds, nanoseconds = _TIMESTAMP.unpack(data)
            return now - max(0.0, time.time() - seconds - nanoseconds * 1e-9)
    return now
