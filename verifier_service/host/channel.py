"""The socket between the process that has the engine and the one that has the clients.

Messages are tuples, a name first, in pickle's form: both ends are started together, of one version, and nobody else has
the socket. To the engine: ("submit", Submission), ("cancel", number, reason, output tokens), ("count_refused",),
("info",), ("flush_cache",), ("watch_cache",), ("end_requests", reason) and ("stop",). From it: ("ready", EngineFacts)
or ("refused", error) once, then ("deliver", [(number, message or error)]) with all output of a step, ("info", message
or error), ("cache_flushed", blocks), ("cache_events", events), ("requests_ended",) and ("failed",); protobuf messages
are bytes.

Not multiprocessing.connection: its `send_bytes` waits for the other end to read, and an event loop cannot read it.
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
    """Return the message as it travels: its size, then itself."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(data)) + data


def receive(connection: socket.socket) -> Message:
    """Wait for the next message; raise EOFError when the other end is closed."""
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
    """`receive` on an event loop."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        message: Message = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    return message


class Outbox:
    """Sends messages from any thread without waiting for the other end to read.

    What the socket takes at once is sent by the caller. The rest, of an end that is slow, is left to a thread, which
    sleeps all other time: one that worked at each message would compete with the engine's for the interpreter.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._send_left, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message, or has it sent; nothing where the other end is closed."""
        data = memoryview(pack(message))
        with self._changed:
            if not self._left:
                data = data[self._send_some(data) :]
            if data:
                self._left.append(data)
                self._changed.notify()

    def close(self) -> None:
        """Return when everything is sent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _send_some(self, data: memoryview) -> int:
        """Return how many bytes the socket has taken."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the other end is closed, and its reader has gone with it
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
