"""Shared memory of the host, described by an anonymous file."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from draftwire.transport.segment import Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HOST_REGISTER_PORTABLE = 1  # pinned for every CUDA context of the process


class HostSegment(Segment):
    """Anonymous shared memory that can neither shrink nor grow; pinned where the process computes on a GPU.

    It is sealed, because a process that reads past the end of a truncated file is killed.

    Attributes:
        mapping: The memory as bytes.
    """

    carrier = pb.CARRIER_SHM

    def __init__(self, fd: int, size: int, device: torch.device) -> None:
        """Map `size` bytes of the file; `device` is where tensors are copied from and to."""
        self.mapping = mmap.mmap(fd, size)
        self.memory = torch.frombuffer(self.mapping, dtype=torch.uint8)
        if device.type == "cuda":
            self._pin(device)

    @classmethod
    def create(cls, size: int, device: torch.device) -> tuple[HostSegment, list[int]]:
        """Create the segment as one file."""
        fd = -1
        try:
            fd = os.memfd_create("draftwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, size)  # touching a page that cannot be allocated kills the process
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size, device), [fd]
        except (OSError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise SegmentError(f"no shared memory of {size} bytes: {error}") from error

    @classmethod
    def unshared(cls, size: int, device: torch.device) -> HostSegment:
        """Return a new segment for one process with both ends; errors as of `create`."""
        segment, fds = cls.create(size, device)
        for fd in fds:
            os.close(fd)
        return segment

    @classmethod
    def attach(cls, fds: Sequence[int], size: int, device: torch.device) -> HostSegment:
        if len(fds) != 1:
            raise SegmentError(f"shared memory is described by 1 file, not {len(fds)}")
        (fd,) = fds
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise SegmentError("the shared memory is not sealed")
            if os.fstat(fd).st_size != size:
                raise SegmentError(f"the shared memory has {os.fstat(fd).st_size} bytes, not {size}")
            # The allocation of huge pages may fail when they are touched.
            if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise SegmentError("the shared memory has pages of another size than this machine's")
            return cls(fd, size, device)
        except (OSError, ValueError) as error:
            raise SegmentError(f"the shared memory cannot be mapped: {error}") from error

    def _pin(self, device: torch.device) -> None:
        address = self.memory.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, self.size, _HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            logger.warning("shared memory of %d bytes cannot be pinned (CUDA error %d)", self.size, int(status))
            _clear_cuda_error(device)
            return
        finalizer = weakref.finalize(self, _unpin, self.mapping, address, device)
        finalizer.atexit = False


def _unpin(_mapping: mmap.mmap, address: int, device: torch.device) -> None:
    """Unpin the memory; the mapping is an argument so that it outlives this call."""
    torch.cuda.synchronize(device)  # copies may still run
    torch.cuda.cudart().cudaHostUnregister(address)


def _clear_cuda_error(device: torch.device) -> None:
    """Clear the last CUDA error, so that no later call reports it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
