"""Functions of the CUDA driver that torch lacks: GPU memory shared by processes, and streams that wait for a word or
write a word.

Memory is shared by virtual memory management. The driver counts the holders of an allocation. The allocation lives
until the last process that has it mapped ends, however the process ends. `cudaIpcGetMemHandle`, which torch wraps in
private functions, is unsuitable: freeing memory that another process has mapped is undefined.

Source: CUDA Driver API, "Virtual Memory Management" and "Stream Memory Operations"; cuda.h.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from draftwire.transport.segment import SegmentError

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, of the cyclic difference
_BEHIND_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream are visible with the word

_HANDLE = _ADDRESS = ctypes.c_ulonglong  # CUmemGenericAllocationHandle, CUdeviceptr
_FLAGS = ctypes.c_ulonglong


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(MemAllocationProp),
        ctypes.c_int,
    ),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), ctypes.c_size_t, ctypes.POINTER(MemAllocationProp), _FLAGS),
    "cuMemRelease": (_HANDLE,),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _HANDLE, ctypes.c_int, _FLAGS),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_HANDLE), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), ctypes.c_size_t, ctypes.c_size_t, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, ctypes.c_size_t),
    "cuMemMap": (_ADDRESS, ctypes.c_size_t, ctypes.c_size_t, _HANDLE, _FLAGS),
    "cuMemUnmap": (_ADDRESS, ctypes.c_size_t),
    "cuMemSetAccess": (_ADDRESS, ctypes.c_size_t, ctypes.POINTER(MemAccessDesc), ctypes.c_size_t),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
}


class CudaDriver:
    """Functions of the CUDA driver; thread-safe.

    An allocation is held by its handle, by every file descriptor of it and by every mapping.

    Raises:
        SegmentError: By every function, with its name and the driver's message.
    """

    def __init__(self, library: Any = None) -> None:
        """`library` replaces libcuda.so.1."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise SegmentError(f"no CUDA driver: {error}") from error
        self._call("cuInit", 0)

    def granularity(self, device: torch.device) -> int:
        """Return the granularity of allocations, bytes."""
        granularity = ctypes.c_size_t()
        prop = _allocation_prop(device)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(prop), _MINIMUM)
        return granularity.value

    def allocate(self, size: int, device: torch.device) -> int:
        """Return a handle of new memory of `device`, `size` bytes."""
        handle = _HANDLE()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(_allocation_prop(device)), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """Return a file descriptor that describes the allocation, which the caller closes."""
        fd = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _FILE, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def import_allocation(self, fd: int) -> int:
        """Return a handle of another process' allocation, described by `fd`."""
        handle = _HANDLE()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _FILE)
        return handle.value

    def map(self, handle: int, size: int, device: torch.device) -> int:
        """Map an allocation for `device`, which may be another GPU, and return the address."""
        address = _ADDRESS()
        access = MemAccessDesc(_location(device), _READ_WRITE)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            except SegmentError:
                self._call("cuMemUnmap", address, size)
                raise
        except SegmentError:
            self._call("cuMemAddressFree", address, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        """Unmap an allocation that no kernel or copy uses any more."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def wait_for_value(self, stream: int, address: int, value: int) -> None:
        """Let later work on a stream wait until the uint32 at `address`, in pinned memory, is `value`."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, _AT_LEAST)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Let a stream write the uint32 at `address`, in pinned memory, after all earlier work."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, _BEHIND_ALL)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise SegmentError(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {status})")


def _location(device: torch.device) -> MemLocation:
    if device.type != "cuda" or device.index is None:
        raise SegmentError(f"{device} has no CUDA memory to share")
    return MemLocation(_ON_DEVICE, device.index)


def _allocation_prop(device: torch.device) -> MemAllocationProp:
    return MemAllocationProp(type=_PINNED, requestedHandleTypes=_FILE, location=_location(device))
