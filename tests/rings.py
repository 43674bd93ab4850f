"""Both ends of a channel in one process."""

from __future__ import annotations

import socket

import torch

from draftwire.transport import Channel, Segment, ring_bytes
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.ring import RingReader, RingWriter, WriteValue

CPU = torch.device("cpu")


def channel_ends(
    device: torch.device = CPU, size: int = ring_bytes(32, 6), write_value: WriteValue | None = None
) -> tuple[Channel, Channel]:
    """Return a verifier's and a drafter's end; `write_value` writes the marks for the verifier's end."""
    return ends_of(HostSegment.unshared(size, device), device, write_value)


def ends_of(
    rings: Segment, device: torch.device = CPU, write_value: WriteValue | None = None
) -> tuple[Channel, Channel]:
    """Return both ends as `channel_ends` does, over the given memory."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    verifier = Channel(ours, RingWriter(rings, 0, device, write_value), RingReader(rings, 1))
    return verifier, Channel(theirs, RingWriter(rings, 1, device), RingReader(rings, 0))


class HeldMarks:
    """Delays the marks behind numbers, like a device whose stream has not reached them yet.

    Attributes
    ----------
    held
        Place and value of each delayed mark, oldest first.
    """

    def __init__(self, rings: Segment) -> None:
        self.held: list[tuple[int, int]] = []
        self._words = rings.memory.numpy().view("uint32")
        self._address = rings.memory.data_ptr()

    def __call__(self, _stream: int, address: int, value: int) -> None:
        self.held.append(((address - self._address) // 4, value))

    def write(self, number: int = -1) -> None:
        """Write one delayed mark, by default the last."""
        place, value = self.held.pop(number)
        self._words[place] = value
