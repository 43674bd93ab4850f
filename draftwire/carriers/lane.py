"""Messages between the engines of two processes of one host."""

from __future__ import annotations

import socket

# A message that is larger goes another way. Steps and drafts whose tensors are in shared memory take a few KiB.
MAX_MESSAGE_BYTES = 128 * 1024
# Messages taken at once, so that a peer that sends without end keeps nobody from other work.
MAX_MESSAGES = 64


class Lane:
    """One end of a connected socket of type SOCK_SEQPACKET. Nothing ever waits.

    A thread that waits for it is woken by the peer's `send`: between two engines there is no other thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray(MAX_MESSAGE_BYTES + 1)

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
        """The messages that are there, at most MAX_MESSAGES.

        Raises
        ------
        ConnectionError
            When the peer is gone or sends what no peer does, and all before it has been received.
        """
        messages: list[bytes] = []
        while len(messages) < MAX_MESSAGES:
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            if not 0 < size <= MAX_MESSAGE_BYTES:
                if messages:
                    break
                raise ConnectionError("the peer is gone" if size == 0 else "a message is too large")
            messages.append(bytes(memoryview(self._buffer)[:size]))
        return messages

    def close(self) -> None:
        """Ends it for both sides."""
        self._socket.close()
