"""Memory that two processes have mapped, and its description as a file.

A segment belongs to the receiver of a direction. It has no name: its file descriptor is handed to the sender over a
socket, so that the kernel frees the memory when the last of the two processes ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from draftwire.carriers.names import carrier_name
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)

# Spans begin at multiples of this. As many bytes before each, and at the segment's beginning, are not of the spans.
ALIGNMENT = 64
NONCE_BYTES = 32
MAX_SEGMENT_BYTES = 1 << 30

# A segment holds this many of the largest steps, within these limits; what has no room goes in the message.
_STEPS = 4
_SEGMENT_BYTES = (4 << 20, 256 << 20)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STAMP = struct.Struct("<QQ")  # generation and size of a span, in the bytes before it
_HOST_REGISTER_PORTABLE = 1  # pinned for every CUDA context of the process


def segment_bytes(step_bytes: int) -> int:
    """Size of the segment of a direction in which a step of the whole batch has `step_bytes`."""
    low, high = _SEGMENT_BYTES
    return min(max(_STEPS * step_bytes, low), high)


class SegmentError(Exception):
    """Memory that cannot be shared; the message says why."""


class Segment(ABC):
    """Shared memory as one process sees it.

    Attributes
    ----------
    carrier
        Kind of memory.
    memory
        uint8 [size], the whole of it. Tensors that are taken of it are valid for as long as the segment is referenced.
    """

    carrier: pb.Carrier
    memory: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The span at `offset`, which must be within the segment, as a tensor."""
        size = math.prod(shape) * dtype.itemsize
        return self.memory[offset : offset + size].view(dtype).view(*shape)

    def read_nonce(self) -> bytes:
        """What stands at the beginning."""
        return self.memory[:NONCE_BYTES].cpu().numpy().tobytes()

    def write_nonce(self, nonce: bytes) -> None:
        """Puts `nonce` at the beginning, seen by the other process when this returns."""
        self.memory[:NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)

    @abstractmethod
    def stamp(self, offset: int, generation: int, num_bytes: int) -> None:
        """Marks a span that is complete."""

    @abstractmethod
    def is_stamped(self, offset: int, generation: int, num_bytes: int) -> bool:
        """Whether the span has that mark, so that it is not an older or an unfinished one."""


class HostSegment(Segment):
    """Anonymous shared memory that can neither shrink nor grow; pinned where the process computes on a GPU.

    Sealed, because a process that reads past the end of a file that another has cut is killed.
    """

    carrier = pb.CARRIER_SHM

    def __init__(self, fd: int, size: int, device: torch.device) -> None:
        """Maps `size` bytes of the file; `device` is where tensors are copied from and to."""
        self._mapping = mmap.mmap(fd, size)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        address = self.memory.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, self.size, _HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            logger.warning("shared memory of %d bytes cannot be pinned (CUDA error %d)", self.size, int(status))
            _clear_cuda_error(device)
            return
        finalizer = weakref.finalize(self, _unpin, self._mapping, address, device)
        finalizer.atexit = False

    def stamp(self, offset: int, generation: int, num_bytes: int) -> None:
        """See `Segment.stamp`."""
        _STAMP.pack_into(self._mapping, offset - ALIGNMENT, generation, num_bytes)

    def is_stamped(self, offset: int, generation: int, num_bytes: int) -> bool:
        """See `Segment.is_stamped`."""
        return _STAMP.unpack_from(self._mapping, offset - ALIGNMENT) == (generation, num_bytes)


def _unpin(_mapping: mmap.mmap, address: int, device: torch.device) -> None:
    """The mapping is an argument so that it is still there."""
    torch.cuda.synchronize(device)  # copies that are under way
    torch.cuda.cudart().cudaHostUnregister(address)


def _clear_cuda_error(device: torch.device) -> None:
    """The next call that looks for errors would find that of another."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def create_segment(carrier: pb.Carrier, size: int, device: torch.device) -> tuple[Segment, int]:
    """A new segment and the file descriptor that describes it, which the caller closes.

    Raises
    ------
    SegmentError
        When there is no such memory, or not so much.
    """
    if carrier != pb.CARRIER_SHM:
        raise SegmentError(f"this version makes no segments of {carrier_name(carrier)}")
    fd = -1
    try:
        fd = os.memfd_create("draftwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size)  # pages that are missing later would kill the process that touches them
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return HostSegment(fd, size, device), fd
    except (OSError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise SegmentError(f"no shared memory of {size} bytes: {error}") from error


def attach_segment(carrier: pb.Carrier, fd: int, size: int, device: torch.device) -> Segment:
    """The segment that another process describes by `fd`, which the caller closes. Nothing of it is trusted.

    Raises
    ------
    SegmentError
        When it cannot be mapped, or could be taken away while it is mapped.
    """
    if not 2 * ALIGNMENT <= size <= MAX_SEGMENT_BYTES:
        raise SegmentError(f"size = {size}: allowed range [{2 * ALIGNMENT}, {MAX_SEGMENT_BYTES}]")
    if carrier != pb.CARRIER_SHM:
        raise SegmentError(f"this version makes no segments of {carrier_name(carrier)}")
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise SegmentError("the shared memory is not sealed")
        if os.fstat(fd).st_size != size:
            raise SegmentError(f"the shared memory has {os.fstat(fd).st_size} bytes, not {size}")
        # Huge pages need not be there when they are touched.
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise SegmentError("the shared memory has pages of another size than this machine's")
        return HostSegment(fd, size, device)
    except (OSError, ValueError) as error:
        raise SegmentError(f"the shared memory cannot be mapped: {error}") from error
