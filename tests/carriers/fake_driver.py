"""A fake CUDA driver for shared memory, with host memory in place of GPU memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from pathlib import Path

import torch

from draftwire.transport.segment import SegmentError

GRANULARITY = 16 * mmap.PAGESIZE
NAME = "fake-gpu"


class FakeDriver:
    """Replaces `CudaDriver` within one process.

    Attributes
    ----------
    handles, mappings
        Handles and mappings that are not released.
    """

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}  # handle -> file
        self.mappings: dict[int, tuple[mmap.mmap, ctypes.c_char]] = {}
        self._next = itertools.count(1)

    def granularity(self, _device: torch.device) -> int:
        return GRANULARITY

    def allocate(self, size: int, _device: torch.device) -> int:
        if size % GRANULARITY:
            raise SegmentError("cuMemCreate: invalid argument (CUDA error 1)")
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._hold(fd)

    def release(self, handle: int) -> None:
        os.close(self.handles.pop(handle))

    def export(self, handle: int) -> int:
        return os.dup(self.handles[handle])

    def import_allocation(self, fd: int) -> int:
        if NAME not in os.readlink(Path("/proc/self/fd") / str(fd)):
            raise SegmentError("cuMemImportFromShareableHandle: invalid argument (CUDA error 1)")
        return self._hold(os.dup(fd))

    def map(self, handle: int, size: int, _device: torch.device) -> int:
        fd = self.handles[handle]
        if size > os.fstat(fd).st_size:
            raise SegmentError("cuMemMap: invalid argument (CUDA error 1)")
        mapping = mmap.mmap(fd, size)
        first = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(first)
        self.mappings[address] = mapping, first
        return address

    def unmap(self, address: int, size: int) -> None:
        mapping, first = self.mappings.pop(address)
        assert len(mapping) == size
        del first
        mapping.close()

    def _hold(self, fd: int) -> int:
        handle = next(self._next)
        self.handles[handle] = fd
        return handle
