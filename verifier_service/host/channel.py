"""The socket between the engine process and the client process.

Messages are pickled tuples that begin with a name. Pickle is safe here: both ends are started together, from one
version, and no other process has the socket. To the engine: ("submit", Submission), ("cancel", number, reason, output
tokens), ("count_refused",), ("info",), ("flush_cache",), ("watch_cache",), ("end_requests", reason) and ("stop",). From
the engine: ("ready", EngineFacts) or ("refused", error) once, then ("deliver", [(number, message or error)]) with all
output of a step, ("info", message or error), ("cache_flushed", blocks), ("cache_events", events), ("requests_ended",)
and ("failed",). Protobuf messages are bytes.

multiprocessing.connection is unsuitable: its `send_bytes` waits for the reader, and an event loop cannot read from it.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
import threading
from collections import deque
from typing import Any

Message = tuple[Any, ...]

_SIZE = struct.Struct("!I")


def pack(message: Message) -> bytes:
    """Return the wire form of a message: its size, then its bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(data)) + data


def receive(connection: socket.socket) -> Message:
    """Wait for the next message; raise EOFError if the other end is closed."""
    (size,) = _SIZE.unpack(_receive_exactly(connection, _SIZE.size))
    message: Message = pickle.loads(_receive_exactly(connection, size))
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


async def read(reader: asyncio.StreamReader) -> Message:
    """Receive as `receive`, on an event loop."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        message: Message = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    return message


class Outbox:
    """Sends messages from any thread without waiting for the reader.

    The caller sends as much as the socket takes at once. A thread sends the rest, for a slow reader. Usually the thread
    sleeps: if it sent each message, it would compete with the engine's thread for the interpreter.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._send_left, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message at once or later; do nothing if the other end is closed."""
        data = memoryview(pack(message))
        with self._changed:
            if not self._left:
                data = data[self._send_some(data) :]
            if data:
                self._left.append(data)
                self._changed.notify()

    def close(self) -> None:
        """Wait until all messages are sent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _send_some(self, data: memoryview) -> int:
        """Send as many bytes as the socket takes, and return their number."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the other end is closed
            return len(data)

    def _send_left(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._is_closing)
                if not self._left:
                    return
            poll.poll()
            with self._changed:
                rest = self._left[0][self._send_some(self._left[0]) :]
                if rest:
                    self._left[0] = rest
                else:
                    self._left.popleft()
