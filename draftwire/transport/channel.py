"""Messages, and numbers that a device writes, between two engines of one host; see docs/ring.md."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import torch

from draftwire.transport.ring import Record, RingReader, RingWriter
from draftwire.transport.segment import Segment, SegmentError

logger = logging.getLogger(__name__)

# Maximum number of wake-up bytes read at once, so that a peer that sends without end does not block its receiver.
MAX_WAKES = 64


def verifier_channel(connection: socket.socket, rings: Segment, device: torch.device) -> Channel:
    """Return the verifier's end; SegmentError when the memory is too small."""
    return Channel(connection, RingWriter(rings, 0, device), RingReader(rings, 1))


def drafter_channel(connection: socket.socket, rings: Segment, device: torch.device) -> Channel:
    """Return the drafter's end; SegmentError when the memory is too small."""
    return Channel(connection, RingWriter(rings, 1, device), RingReader(rings, 0))


class Channel:
    """One side's ends of both rings and of the socket. No call waits for the peer.

    `send` may be called from any thread, every other method from one thread, which also releases bodies.

    The peer's `send` wakes the thread that waits for the channel, with no thread between the two engines.

    Attributes:
        takes_numbers: Whether numbers can be sent; false after the device failed to write numbers.
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
        """Return the descriptor, which is readable when there are messages or the peer is gone."""
        return self._socket.fileno()

    def send(self, message: bytes, numbers: torch.Tensor | None = None) -> bool:
        """Send a message, and numbers that the device writes after it; see `RingWriter.write`.

        Return False if the message is too long, too many messages are unread, or the peer is gone.
        """
        try:
            with self._sending:
                is_written = self._writer.write(message, numbers)
            if not is_written:
                return False
            with contextlib.suppress(BlockingIOError):  # enough wake-up bytes are in the socket
                self._socket.send(b"\0", socket.MSG_NOSIGNAL)
        except OSError:  # ConnectionError is one
            return False
        except SegmentError as error:
            logger.warning("the device does not write into shared memory: %s", error)
            self.takes_numbers = False
            return False
        return True

    def receive(self) -> list[Record]:
        """Return the records that have arrived, and leave the channel readable if there may be more.

        Raises:
            ConnectionError: If the peer is gone or has broken the protocol, after all earlier records were received.
        """
        is_gone, records = self._drain(), self._reader.read()
        if is_gone and not records:
            raise ConnectionError("the peer is gone")
        return records

    def _drain(self) -> bool:
        """Read the wake-up bytes, and return whether the peer is gone.

        Records that were written before these bytes can be read afterwards.
        """
        for _ in range(MAX_WAKES):
            try:
                # No room for ancillary data: a peer could send open files along, which would stay open here.
                if not self._socket.recv(1):
                    return True
            except BlockingIOError:
                break
            except OSError:
                return True
        return False

    def close(self) -> None:
        """Close the channel for both sides."""
        self._socket.close()
