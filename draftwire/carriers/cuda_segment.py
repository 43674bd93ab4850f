"""Shared memory of a GPU, described by a file of the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from draftwire.carriers.cuda_driver import CudaDriver
from draftwire.carriers.dlpack import tensor_at
from draftwire.carriers.host_segment import HostSegment
from draftwire.carriers.segment import MAX_SPANS, Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb

_STAMP = struct.Struct("<QQQ")  # generation, offset and size of a span, at the place of its generation modulo MAX_SPANS
_STAMPS_BYTES = MAX_SPANS * _STAMP.size
_CPU = torch.device("cpu")


@cache
def cuda_driver() -> CudaDriver:
    """That of this process.

    Raises
    ------
    SegmentError
        When there is none.
    """
    return CudaDriver()


class CudaSegment(Segment):
    """Memory of the receiver's GPU, which the sender's GPU writes: the same one, or one with peer access to it.

    The driver frees it when neither process has it mapped; a sender may go on to write it when the receiver was
    killed. Stamps are in host memory beside it, so that neither side waits for a GPU to write or read one: a span is
    stamped after the sender's stream has written it, and read by a copy that is issued after the stamp was found.
    """

    carrier = pb.CARRIER_CUDA_IPC

    def __init__(self, driver: CudaDriver, handle: int, stamps: HostSegment, size: int, device: torch.device) -> None:
        """Maps the allocation, at least `size` bytes, for `device`; the handle may be released then."""
        mapped = _mapped_bytes(driver, size, device)
        address = driver.map(handle, mapped, device)
        finalizer = weakref.finalize(self, _unmap, driver, address, mapped, device)
        finalizer.atexit = False
        self.memory = tensor_at(address, size, device)
        self._stamps = stamps.mapping

    @classmethod
    def create(
        cls, size: int, device: torch.device, driver: CudaDriver | None = None
    ) -> tuple[CudaSegment, list[int]]:
        """See `Segment.create`; a file of the driver, and one of the stamps."""
        driver = driver or cuda_driver()
        with contextlib.ExitStack() as on_failure:
            with contextlib.ExitStack() as stack:
                handle = driver.allocate(_mapped_bytes(driver, size, device), device)
                stack.callback(driver.release, handle)
                fd = driver.export(handle)
                on_failure.callback(os.close, fd)
                stamps, fds = HostSegment.create(_STAMPS_BYTES, _CPU)
                on_failure.callback(os.close, *fds)
                segment = cls(driver, handle, stamps, size, device)
            on_failure.pop_all()
            return segment, [fd, *fds]

    @classmethod
    def attach(
        cls, fds: Sequence[int], size: int, device: torch.device, driver: CudaDriver | None = None
    ) -> CudaSegment:
        """See `Segment.attach`. The driver refuses to map more than there is."""
        if len(fds) != 2:
            raise SegmentError(f"memory of a GPU is described by 2 files, not {len(fds)}")
        driver = driver or cuda_driver()
        stamps = HostSegment.attach(fds[1:], _STAMPS_BYTES, _CPU)
        handle = driver.import_allocation(fds[0])
        try:
            return cls(driver, handle, stamps, size, device)
        finally:
            driver.release(handle)

    def stamp(self, offset: int, generation: int, num_bytes: int) -> None:
        """See `Segment.stamp`."""
        _STAMP.pack_into(self._stamps, _place(generation), generation, offset, num_bytes)

    def is_stamped(self, offset: int, generation: int, num_bytes: int) -> bool:
        """See `Segment.is_stamped`."""
        return _STAMP.unpack_from(self._stamps, _place(generation)) == (generation, offset, num_bytes)


def _place(generation: int) -> int:
    return generation % MAX_SPANS * _STAMP.size


def _mapped_bytes(driver: CudaDriver, size: int, device: torch.device) -> int:
    granularity = driver.granularity(device)
    return -(-size // granularity) * granularity


def _unmap(driver: CudaDriver, address: int, size: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels and copies that are under way
    driver.unmap(address, size)
