"""A tensor over memory that torch did not allocate.

DLPack names the device of the tensor: a GPU that has another GPU's memory mapped must copy on its own streams.
`__cuda_array_interface__` names no device, and torch takes the GPU that owns the memory.
"""

from __future__ import annotations

import ctypes

import torch

_CPU, _CUDA = 1, 2
_UNSIGNED = 1
_NAME = b"dltensor"  # kept alive: the capsule refers to the bytes


class _Tensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, and the shape that it points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("shape_0", ctypes.c_int64),
    )


_c = ctypes.CDLL(None)
_c.malloc.restype = ctypes.c_void_p
_c.malloc.argtypes = (ctypes.c_size_t,)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the memory at `address`, accessible to `device`, as uint8 [size]. The caller keeps the memory mapped.

    Source: dmlc/dlpack, dlpack.h.
    """
    place = _c.malloc(ctypes.sizeof(_Tensor))
    if not place:
        raise MemoryError("no memory for the description of a tensor")
    description = _Tensor(
        data=address,
        device_type=_CUDA if device.type == "cuda" else _CPU,
        device_id=device.index or 0,
        ndim=1,
        dtype_code=_UNSIGNED,
        dtype_bits=8,
        dtype_lanes=1,
        shape=place + _Tensor.shape_0.offset,
        strides=None,
        byte_offset=0,
        manager_ctx=None,
        deleter=ctypes.cast(_c.free, ctypes.c_void_p),  # frees this description after the last view
        shape_0=size,
    )
    ctypes.memmove(place, ctypes.byref(description), ctypes.sizeof(description))
    return torch.from_dlpack(_new_capsule(place, _NAME, None))
