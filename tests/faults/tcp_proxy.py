"""A TCP relay in front of a service, with faults that are switched on and off while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from exact_services import Loop

CHUNK_BYTES = 65536
# Smallest chunk that is cut: shorter than any message of a step, longer than HTTP/2's acknowledgements.
LEAST_CUT_BYTES = 48


class TcpProxy:
    """Forward bytes in both directions, with the faults that the attributes set; any thread may set them.

    Attributes
    ----------
    delay_s
        Delay of each chunk of bytes from the service.
    bytes_per_s
        Maximum throughput in each direction; None for no limit.
    is_silent
        Forward nothing and end no connection, as when a host has vanished.
    """

    def __init__(self, upstream: str) -> None:
        """`upstream` is the service's HOST:PORT; the service may start later."""
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.is_silent = False
        self._cuts: set[bool] = set()  # directions of the pending cuts: True from the service
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = Loop()
        self._server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    def cut(self, *, from_service: bool) -> None:
        """Reset a connection in the middle of the next message in this direction; half of the message arrives."""
        self._cuts.add(from_service)

    @property
    def is_cut(self) -> bool:
        """Return whether all requested cuts have happened."""
        return not self._cuts

    def close(self) -> None:
        """Stop the proxy and reset its connections."""
        self._loop.run(self._stop())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            service_reader, service_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, service_writer}
        self._writers |= writers
        pumps = [
            asyncio.create_task(self._pump(reader, service_writer, from_service=False)),
            asyncio.create_task(self._pump(service_reader, writer, from_service=True)),
        ]
        try:
            with contextlib.suppress(OSError):
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in writers:
                one.transport.abort()
            self._writers -= writers
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_service: bool) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if from_service and self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(chunk) / self.bytes_per_s)
            while self.is_silent:
                await asyncio.sleep(0.05)
            if from_service in self._cuts and len(chunk) >= LEAST_CUT_BYTES:
                self._cuts.discard(from_service)
                writer.write(chunk[: len(chunk) // 2])
                await writer.drain()
                return
            writer.write(chunk)
            await writer.drain()
