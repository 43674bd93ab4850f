"""Memory mapped by two processes.

A segment belongs to the receiver of a direction. The sender gets file descriptors of the segment over a socket, so that
the memory is freed when the last of the two processes ends, however it ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.tensors import DTYPES
from draftwire.v1 import draft_pb2 as pb

# Spans begin at multiples of this. As many bytes before each span, and at the start of the segment, are reserved.
ALIGNMENT = 64
NONCE_BYTES = 32
MAX_SEGMENT_BYTES = 1 << 30
# Maximum number of unread spans: two for each unanswered step.
MAX_SPANS = 128

# A segment holds this many of the largest steps, within these limits; other tensors go in the message.
_STEPS = 4
_SEGMENT_BYTES = (4 << 20, 256 << 20)


def segment_bytes(step_bytes: int) -> int:
    """Return the size in bytes of a segment for steps of at most `step_bytes`."""
    low, high = _SEGMENT_BYTES
    return min(max(_STEPS * step_bytes, low), high)


class SegmentError(Exception):
    """Memory that cannot be shared; the message has the reason."""


def check_span(name: str, offset: int, num_bytes: int, segment_bytes: int) -> None:
    """Raise InvalidArgumentError, which names the field `name`, if a segment has no such span."""
    if offset % ALIGNMENT or offset < 2 * ALIGNMENT or offset + num_bytes > segment_bytes or num_bytes == 0:
        allowed = f"{num_bytes} bytes must lie in [{2 * ALIGNMENT}, {segment_bytes}), from a multiple of {ALIGNMENT} on"
        raise InvalidArgumentError(name, offset, allowed)


class Segment(ABC):
    """Shared memory, as mapped in one process.

    Attributes:
        carrier: Kind of memory.
        memory: The whole memory, uint8 [size]. Views of the memory are valid while the segment is referenced.
    """

    carrier: pb.Carrier
    memory: torch.Tensor

    @classmethod
    @abstractmethod
    def create(cls, size: int, device: torch.device) -> tuple[Self, list[int]]:
        """Return a new segment and the file descriptors that describe it, which the caller closes.

        Raises:
            SegmentError: If there is no such memory, or not enough.
        """

    @classmethod
    @abstractmethod
    def attach(cls, fds: Sequence[int], size: int, device: torch.device) -> Self:
        """Map the segment that another process describes by `fds`, which the caller closes. Its contents are untrusted.

        Raises:
            SegmentError: If the memory cannot be mapped, or could vanish while mapped.
        """

    @cached_property
    def size(self) -> int:
        """Return the size in bytes."""
        return self.memory.numel()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the span at `offset`, a multiple of ALIGNMENT, which must be within the segment, as a tensor."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return self._elements[dtype].as_strided(shape, strides[::-1], offset // dtype.itemsize)

    @cached_property
    def _elements(self) -> dict[torch.dtype, torch.Tensor]:
        """Return the memory as elements of one type; cached, because each operation on a tensor costs some
        microseconds."""
        whole = self.memory[: self.size // 8 * 8]
        return {dtype: whole.view(dtype) for dtype in DTYPES.values()}

    def read_nonce(self) -> bytes:
        """Return the bytes at the start of the segment; raise SegmentError if the GPU cannot read them."""
        try:
            return self.memory[:NONCE_BYTES].clone().cpu().numpy().tobytes()
        except RuntimeError as error:
            raise SegmentError(f"the memory cannot be read: {error}") from error

    def write_nonce(self, nonce: bytes) -> None:
        """Write `nonce` to the start of the segment, visible to the other process on return.

        Raise SegmentError if the GPU cannot write the memory.
        """
        try:
            self.memory[:NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).to(self.memory.device)
            if self.memory.is_cuda:
                # Synchronize the stream, not the device: another thread may be capturing a graph.
                torch.cuda.current_stream(self.memory.device).synchronize()
        except RuntimeError as error:
            raise SegmentError(f"the memory cannot be written: {error}") from error
