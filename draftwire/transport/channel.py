"""Messages, and numbers that a device writes, between the engines of two processes of one host; see docs/ring.md."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import torch

from draftwire.transport.ring import Record, RingReader, RingWriter
from draftwire.transport.segment import Segment, SegmentError

logger = logging.getLogger(__name__)

# Bytes that wake a side and are taken at once, so that a peer that sends without end keeps nobody from other work.
MAX_WAKES = 64


def verifier_channel(connection: socket.socket, rings: Segment, device: torch.device) -> Channel:
    """Return the verifier's end; SegmentError when the memory is too small."""
    return Channel(connection, RingWriter(rings, 0, device), RingReader(rings, 1))


def drafter_channel(connection: socket.socket, rings: Segment, device: torch.device) -> Channel:
    """Return the drafter's end; SegmentError when the memory is too small."""
    return Channel(connection, RingWriter(rings, 1, device), RingReader(rings, 0))


class Channel:
    """Both rings and the socket, as one side has them. Nothing ever waits for the peer.

    `send` may be called from any thread, all else by one thread, which also releases bodies.

    A thread that waits for it is woken by the peer's `send`: between two engines there is no other thread.

    Attributes
    ----------
    takes_numbers
        Whether numbers can be sent: the device has not failed to write them.
    """

    def __init__(self, connection: socket.socket, writer: RingWriter, reader: RingReader) -> None:
        """The `connection` is connected, of type SOCK_SEQPACKET."""
        connection.setblocking(False)
        self.takes_numbers = True
        self._socket = connection
        self._sending = threading.Lock()  # a ring has one writer at a time
        self._writer = writer
        self._reader = reader

    @property
    def memory(self) -> torch.Tensor:
        """The shared memory of both rings, uint8 [bytes]."""
        return self._writer.segment.memory

    def fileno(self) -> int:
        """Readable when there are messages, or when the peer is gone."""
        return self._socket.fileno()

    def send(self, message: bytes, numbers: torch.Tensor | None = None) -> bool:
        """Send a message whole, and numbers that the device writes behind it; see `RingWriter.write`.

        False when it is too long, when too many are unread, or when the peer is gone.
        """
        try:
            with self._sending:
                is_written = self._writer.write(message, numbers)
            if not is_written:
                return False
            with contextlib.suppress(BlockingIOError):  # bytes that wake the peer are there already
                self._socket.send(b"\0", socket.MSG_NOSIGNAL)
        except OSError:  # ConnectionError is one
            return False
        except SegmentError as error:
            logger.warning("the device does not write into shared memory: %s", error)
            self.takes_numbers = False
            return False
        return True

    def receive(self) -> list[Record]:
        """Return the records that are there, and leave the channel readable when there may be more.

        Raises
        ------
        ConnectionError
            When the peer is gone or sends what no peer does, and all before it has been received.
        """
        is_gone, records = self._drain(), self._reader.read()
        if is_gone and not records:
            raise ConnectionError("the peer is gone")
        return records

    def _drain(self) -> bool:
        """Take the bytes that wake this side; whether the peer is gone.

        What was written before they were sent is read after this.
        """
        for _ in range(MAX_WAKES):
            try:
                # No room for anything else: a peer could send open files along, which would stay open here.
                if not self._socket.recv(1):
                    return True
            except BlockingIOError:
                break
            except OSError:
                return True
        return False

    def close(self) -> None:
        """End it for both sides."""
        self._socket.close()
