"""A hand-written HTTP/2 client, which can open calls without sending their message or send only a part of it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4  # a setting
CANCEL = 8  # an error code
FRAME_BYTES = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(path: str, extra: Sequence[tuple[str, str]]) -> bytes:
    """Return the headers of a gRPC call as HPACK literals without indexing; lone surrogates stand for single bytes."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "half.sent")]
    out = bytearray()
    for field in (*fields, ("te", "trailers"), ("content-type", "application/grpc"), *extra):
        out.append(0)
        for text in field:
            encoded = text.encode(errors="surrogateescape")
            out += bytes([len(encoded)]) + encoded
    return bytes(out)


class HalfSender:
    """One connection and its calls. Respects flow control; records which calls the server has ended.

    Attributes
    ----------
    ended, dropped
        Numbers of the calls that the server has ended, and of those that it has reset without a status.
    num_sent
        Bytes of messages sent so far.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._window = 65535  # of the connection
        self._initial_window = 65535  # of a call
        self._windows: dict[int, int] = {}
        self._last = -1
        self._is_changed = asyncio.Event()
        self.ended: set[int] = set()
        self.dropped: set[int] = set()
        self.num_sent = 0

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        self._task = asyncio.create_task(self._read_frames())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._task

    async def begin(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Begin a call; return its number."""
        return (await self.begin_many(1, path, metadata))[0]

    async def begin_many(self, count: int, path: str, metadata: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Begin calls at once; return their numbers."""
        calls = [self._last + 2 * number for number in range(1, count + 1)]
        self._last = calls[-1]
        self._windows.update(dict.fromkeys(calls, self._initial_window))
        block = header_block(path, metadata)
        self._writer.write(b"".join(frame(HEADERS, END_HEADERS, call, block) for call in calls))
        await self._writer.drain()
        return calls

    async def send(self, call: int, num_bytes: int, short: int, first: bytes = b"") -> None:
        """Send a message without its last `short` bytes, as far as flow control allows.

        The message has `num_bytes` bytes: those of `first`, then zeros.
        """
        data = struct.pack(">BI", 0, num_bytes) + first
        left = len(data) + num_bytes - short
        while left > 0 and call not in self.ended:
            size = min(left, self._window, self._windows[call], FRAME_BYTES)
            if size <= 0:
                self._is_changed.clear()
                await self._is_changed.wait()
                continue
            self._window -= size
            self._windows[call] -= size
            self._writer.write(frame(DATA, 0, call, data[:size].ljust(size, b"\0")))
            data = data[size:]
            left -= size
            self.num_sent += size
            await self._writer.drain()

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        self._writer.write(frame(RST_STREAM, 0, call, struct.pack(">I", CANCEL)))

    async def wait_for_ends(self, count: int, timeout_s: float) -> None:
        """Wait until the server has ended `count` calls."""
        async with asyncio.timeout(timeout_s):
            while len(self.ended) < count:
                self._is_changed.clear()
                await self._is_changed.wait()

    async def _read_frames(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == SETTINGS and not flags & ACK:
                self._take_settings(payload)
            elif kind == PING and not flags & ACK:
                self._writer.write(frame(PING, ACK, 0, payload))
            elif kind == WINDOW_UPDATE:
                (size,) = struct.unpack(">I", payload)
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + size
                else:
                    self._window += size
            if kind == RST_STREAM and stream not in self.ended:
                self.dropped.add(stream)
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream)
            self._is_changed.set()

    def _take_settings(self, payload: bytes) -> None:
        for setting, value in struct.iter_unpack(">HI", payload):
            if setting == INITIAL_WINDOW_SIZE:
                for call in self._windows:
                    self._windows[call] += value - self._initial_window
                self._initial_window = value
        self._writer.write(frame(SETTINGS, ACK, 0, b""))
