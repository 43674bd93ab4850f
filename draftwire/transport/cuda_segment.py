"""Shared memory of a GPU, described by a file of the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from draftwire.transport.cuda_driver import CudaDriver
from draftwire.transport.dlpack import tensor_at
from draftwire.transport.segment import Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb


@cache
def cuda_driver() -> CudaDriver:
    """Return the driver of this process; raise SegmentError if there is none."""
    return CudaDriver()


class CudaSegment(Segment):
    """Memory of the receiver's GPU, which the sender's GPU writes: the same one, or one with peer access to it.

    The driver frees the memory when neither process has it mapped, so a sender may still write after the receiver was
    killed. A message names a span after the sender's stream has written it.
    """

    carrier = pb.CARRIER_CUDA_IPC

    def __init__(self, driver: CudaDriver, handle: int, size: int, device: torch.device) -> None:
        """Map the allocation, at least `size` bytes, for `device`; the caller may release the handle afterwards."""
        mapped = _mapped_bytes(driver, size, device)
        address = driver.map(handle, mapped, device)
        finalizer = weakref.finalize(self, _unmap, driver, address, mapped, device)
        finalizer.atexit = False
        self.memory = tensor_at(address, size, device)

    @classmethod
    def create(cls, size: int, device: torch.device, driver: CudaDriver | None = None) -> tuple[CudaSegment, list[int]]:
        """Create the segment; its file descriptor is the driver's."""
        driver = driver or cuda_driver()
        with contextlib.ExitStack() as on_failure:
            with contextlib.ExitStack() as stack:
                handle = driver.allocate(_mapped_bytes(driver, size, device), device)
                stack.callback(driver.release, handle)
                fd = driver.export(handle)
                on_failure.callback(os.close, fd)
                segment = cls(driver, handle, size, device)
            on_failure.pop_all()
            return segment, [fd]

    @classmethod
    def attach(
        cls, fds: Sequence[int], size: int, device: torch.device, driver: CudaDriver | None = None
    ) -> CudaSegment:
        """Map the segment; the driver refuses to map more than was allocated."""
        if len(fds) != 1:
            raise SegmentError(f"memory of a GPU is described by 1 file, not {len(fds)}")
        driver = driver or cuda_driver()
        handle = driver.import_allocation(fds[0])
        try:
            return cls(driver, handle, size, device)
        finally:
            driver.release(handle)


def _mapped_bytes(driver: CudaDriver, size: int, device: torch.device) -> int:
    granularity = driver.granularity(device)
    return -(-size // granularity) * granularity


def _unmap(driver: CudaDriver, address: int, size: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels and copies may still run
    driver.unmap(address, size)
