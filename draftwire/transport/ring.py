"""A ring: messages, and numbers that a device writes, from one process of a host to another.

docs/ring.md has the layout, the memory ordering and what is not trusted.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from draftwire.transport.cuda_segment import cuda_driver
from draftwire.transport.segment import ALIGNMENT, Segment, SegmentError

# A longer message goes over the stream. Steps and drafts whose tensors are in shared memory take a few KiB.
MAX_MESSAGE_BYTES = 128 * 1024
# Bodies that must fit beside the longest message: of all announced steps, and one more.
_BODIES = 5
_SKIP = 0xFFFFFFFF
_HEADER = struct.Struct("<IIIIQ")
_WORD_BYTES = 4
_FIRST = ALIGNMENT  # the segment's first bytes have the nonce

WriteValue = Callable[[int, int, int], None]  # stream, address, value


def ring_bytes(max_sequences: int, max_drafts: int) -> int:
    """Return the size of a segment with both rings, for steps of `max_sequences` with `max_drafts` + 1 rows each, and
    for their early drafts with confidences."""
    body = 2 * ALIGNMENT + _padded(_WORD_BYTES * max_sequences * max(max_drafts + 2, 2 * max_drafts))
    return _FIRST + 2 * (2 * (ALIGNMENT + MAX_MESSAGE_BYTES) + _BODIES * (body + 16 * ALIGNMENT))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Ring:
    """One end of one direction."""

    def __init__(self, segment: Segment, number: int) -> None:
        """`number`: 0 for the ring from verifier to drafter, else 1. Raises SegmentError if `segment` is too small."""
        whole = (segment.size - _FIRST) // 2 // ALIGNMENT * ALIGNMENT
        self.segment = segment
        self._begin = _FIRST + number * whole + ALIGNMENT  # of the records, in the segment
        self._size = whole - ALIGNMENT
        if self._size < 2 * ALIGNMENT:
            raise SegmentError(f"{segment.size} bytes have no room for two rings")
        self._bytes = segment.memory.numpy()[: segment.size // ALIGNMENT * ALIGNMENT]
        self._words = self._bytes.view(np.uint32)
        self._read = self._bytes[self._begin - ALIGNMENT : self._begin].view(np.uint64)
        self._position = 0  # of the next record
        self._stamp = 1  # of the next record
        self._lock = threading.Lock()
        self._lock.acquire()

    def _fence(self) -> None:
        """Order earlier memory accesses before later ones; see docs/ring.md."""
        self._lock.release()
        self._lock.acquire()

    def _offset(self, position: int) -> int:
        """Return the offset of a position in the segment."""
        return self._begin + position % self._size

    def _next_stamp(self) -> None:
        self._stamp = self._stamp % (2**32 - 1) + 1


class RingWriter(_Ring):
    """Used by one thread at a time."""

    def __init__(
        self, segment: Segment, number: int, device: torch.device, write_value: WriteValue | None = None
    ) -> None:
        """`device` writes the bodies; `write_value` replaces the driver's function in tests."""
        super().__init__(segment, number)
        self._device = device
        self._write_value = write_value  # None on a CPU, whose writes are done when they are called
        self._has_tried = False  # whether the device has written a mark once
        self._known_read = 0

    def write(self, message: bytes, numbers: torch.Tensor | None = None) -> bool:
        """Write a record; return False if it is too long or there is no room.

        The current stream writes `numbers`, int32 on the device, and then their mark.

        Raises:
            ConnectionError: If the reader claims to have read records that were not written.
            SegmentError: If the device cannot write to the ring. Nothing has been written then.
        """
        body = 0 if numbers is None else ALIGNMENT + _padded(numbers.nbytes)
        size = ALIGNMENT + _padded(len(message)) + body
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        left = self._size - self._position % self._size
        skipped = left if size > left else 0
        if self._position + skipped + size + ALIGNMENT - self._load_read() > self._size:  # and the next one's stamp
            return False
        if skipped:
            self._publish(_SKIP, 0, left)
        at = self._offset(self._position) + ALIGNMENT
        self._bytes[at : at + len(message)] = np.frombuffer(message, np.uint8)
        if numbers is not None:
            self._write_body(at + _padded(len(message)), numbers)
        self._publish(len(message), 0 if numbers is None else numbers.nbytes, size)
        return True

    def _load_read(self) -> int:
        read = self._read.item(0)
        if not self._known_read <= read <= self._position:
            raise ConnectionError(f"the peer has read up to {read}, between {self._known_read} and {self._position}")
        self._known_read = read
        self._fence()
        return read

    def _write_body(self, mark: int, numbers: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        self._try_device(stream, mark)
        self._words[mark // _WORD_BYTES] = 0
        body = self.segment.tensor(mark + ALIGNMENT, torch.int32, tuple(numbers.shape))
        body.copy_(numbers, non_blocking=True)
        if self._write_value is None:
            self._fence()
            self._words[mark // _WORD_BYTES] = self._stamp
        else:
            self._write_value(stream, self.segment.memory.data_ptr() + mark, self._stamp)

    def _try_device(self, stream: int, mark: int) -> None:
        """Let the device write a mark once before the first numbers, so that a failure leaves no numbers without a
        mark."""
        if self._has_tried or self._device.type != "cuda":
            return
        if not self.segment.memory.is_pinned():
            raise SegmentError("the memory is not pinned")
        self._write_value = self._write_value or cuda_driver().write_value
        self._write_value(stream, self.segment.memory.data_ptr() + mark, 0)
        self._has_tried = True

    def _publish(self, length: int, body: int, size: int) -> None:
        at = self._offset(self._position)
        header = _HEADER.pack(0, length, body, 0, time.monotonic_ns())
        self._bytes[at + _WORD_BYTES : at + _HEADER.size] = np.frombuffer(header, np.uint8)[_WORD_BYTES:]
        self._position += size
        self._words[self._offset(self._position) // _WORD_BYTES] = 0
        self._fence()
        self._words[at // _WORD_BYTES] = self._stamp
        self._next_stamp()


class Body:
    """Numbers that the writer's device writes behind a message.

    Attributes:
        num_numbers: Count of the numbers, int32 each.
    """

    def __init__(self, ring: RingReader, record: int, mark: int, stamp: int, num_numbers: int) -> None:
        self.num_numbers = num_numbers
        self._ring = ring
        self._record = record
        self._mark = mark
        self._stamp = stamp

    @property
    def is_written(self) -> bool:
        """Return whether the device has written all numbers."""
        return self._ring.load_word(self._mark) == self._stamp

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a copy of the first numbers, int32; untrusted."""
        return self._ring.copy_numbers(self._mark + ALIGNMENT, shape)

    def release(self) -> None:
        """Release the room of the numbers. Later calls have no effect."""
        self._ring.release(self._record)


class Record(NamedTuple):
    """A message that has been read."""

    message: bytes
    written: float  # monotonic time, between the last read without a record and now
    body: Body | None


class RingReader(_Ring):
    """Used by one thread at a time."""

    def __init__(self, segment: Segment, number: int) -> None:
        super().__init__(segment, number)
        self._held: deque[int] = deque()  # positions of records with bodies, oldest first
        self._released: set[int] = set()  # positions of released records
        self._empty_at = -math.inf  # monotonic time at which there was no record

    def read(self) -> list[Record]:
        """Return the records that have arrived, at most as many as fit into the ring.

        Raises:
            ConnectionError: If the writer has broken the format.
        """
        records: list[Record] = []
        begin = self._position
        while self._position < begin + self._size and self.load_word(self._offset(self._position)) == self._stamp:
            record = self._read_record()
            if record is not None:
                records.append(record)
            self._next_stamp()
        self._empty_at = time.monotonic()
        self._free()
        return records

    def _read_record(self) -> Record | None:
        at = self._offset(self._position)
        left = self._size - self._position % self._size
        _, length, body, _, written_ns = _HEADER.unpack(self._bytes[at : at + _HEADER.size].tobytes())
        if length == _SKIP:
            self._position += left
            return None
        size = ALIGNMENT + _padded(length) + (ALIGNMENT + _padded(body) if body else 0)
        if length > MAX_MESSAGE_BYTES or body % _WORD_BYTES or size > left:
            raise ConnectionError(f"a record of {length} and {body} bytes does not fit into {left}")
        begin = at + ALIGNMENT
        message = self._bytes[begin : begin + length].tobytes()
        numbers = None
        if body:
            mark = begin + _padded(length)
            numbers = Body(self, self._position, mark, self._stamp, body // _WORD_BYTES)
            self._held.append(self._position)
        self._position += size
        now = time.monotonic()
        return Record(message, min(max(written_ns * 1e-9, self._empty_at), now), numbers)

    def load_word(self, offset: int) -> int:
        """Load a stamp or a mark; the data that it publishes may be loaded afterwards."""
        word: int = self._words.item(offset // _WORD_BYTES)
        self._fence()
        return word

    def copy_numbers(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return a copy of int32 numbers."""
        first = offset // _WORD_BYTES
        return self._words[first : first + math.prod(shape)].copy().view(np.int32).reshape(shape)

    def release(self, record: int) -> None:
        """Release a record with a body."""
        if record in self._held:
            self._released.add(record)
            self._free()

    def _free(self) -> None:
        """Publish the position up to which all records are released."""
        while self._held and self._held[0] in self._released:
            self._released.discard(self._held.popleft())
        self._fence()
        self._read[0] = self._held[0] if self._held else self._position
