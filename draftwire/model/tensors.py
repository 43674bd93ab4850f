"""Tensors with their elements in the message: raw little-endian bytes with dtype and shape."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.v1 import draft_pb2 as pb

# torch.frombuffer warns that a message's bytes are read-only; nothing writes to decoded tensors.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

DTYPES = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_FLOAT16: torch.float16,
    pb.DTYPE_INT32: torch.int32,
    pb.DTYPE_INT64: torch.int64,
}
WIRE_DTYPES = {dtype: number for number, dtype in DTYPES.items()}


def encode_tensor(tensor: torch.Tensor, message: pb.Tensor | None = None) -> pb.Tensor:
    """Return the wire form of a tensor of any device, written into `message` if given."""
    message = pb.Tensor() if message is None else message
    message.dtype = WIRE_DTYPES[tensor.dtype]
    message.shape.extend(tensor.shape)
    message.data = tensor_bytes(tensor)
    return message


def encode_ids(ids: Sequence[int] | np.ndarray, message: pb.Tensor) -> None:
    """Write token ids into `message` as an int32 tensor [len(ids)]; faster than `encode_tensor`."""
    message.dtype = pb.DTYPE_INT32
    message.shape[:] = [len(ids)]
    message.data = np.asarray(ids, np.int32).tobytes()


def decode_ids(message: pb.Tensor, name: str, count: int) -> list[int]:
    """Return the values of `decode_id_array` as a list."""
    return decode_id_array(message, name, count).tolist()


def decode_id_array(message: pb.Tensor, name: str, count: int) -> np.ndarray:
    """Return the values of an int32 tensor [count], whose range is not checked; errors as of `decode_tensor`."""
    check_tensor(message, name, torch.int32, (count,))
    return np.frombuffer(_checked_data(message, name, 4 * count), np.int32)


def encode_floats(values: np.ndarray, message: pb.Tensor) -> None:
    """Write float32 [n] values into `message`; faster than `encode_tensor`."""
    message.dtype = pb.DTYPE_FLOAT32
    message.shape[:] = [len(values)]
    message.data = values.astype(np.float32, copy=False).tobytes()


def decode_probabilities(message: pb.Tensor, name: str, count: int) -> np.ndarray:
    """Return the values of a float32 tensor [count], all in [0, 1].

    Raises:
        InvalidArgumentError: As of `decode_tensor`, and if a value is NaN or out of range.
    """
    check_tensor(message, name, torch.float32, (count,))
    values = np.frombuffer(_checked_data(message, name, 4 * count), np.float32)
    is_wrong = ~((values >= 0.0) & (values <= 1.0))  # true for NaN
    if is_wrong.any():
        raise InvalidArgumentError(name, float(values[is_wrong][0]), "allowed range [0, 1]")
    return values


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor of any device, row-major and little-endian."""
    return tensor_view(tensor.detach().to("cpu").contiguous()).tobytes()


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def decode_tensor(message: pb.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
    """Return a read-only CPU tensor over one copy of the message's bytes.

    Args:
        message: Untrusted, from the wire.
        name: Field name for errors.
        dtype: Required type.
        shape: Required size of each dimension; None takes any.

    Raises:
        InvalidArgumentError: If dtype, shape or number of bytes are wrong.
    """
    given = check_tensor(message, name, dtype, shape)
    size = math.prod(given) * dtype.itemsize
    data = _checked_data(message, name, size)
    if size == 0:
        return torch.empty(given, dtype=dtype)
    return torch.frombuffer(memoryview(data), dtype=dtype).reshape(given)


def _checked_data(message: pb.Tensor, name: str, size: int) -> bytes:
    data = message.data  # protobuf copies the bytes at each access
    if len(data) != size:
        raise InvalidArgumentError(f"{name}.data", f"{len(data)} bytes", f"must be {size} bytes")
    return data


def check_tensor(message: pb.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of any carrier; parameters and errors as of `decode_tensor`."""
    if DTYPES.get(message.dtype) != dtype:
        raise InvalidArgumentError(f"{name}.dtype", message.dtype, f"must be {WIRE_DTYPES[dtype]} ({dtype})")
    given = tuple(message.shape[:])  # one copy is faster than an access to each size
    if given != shape and not _fits(given, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(f"{name}.shape", given, f"must be [{wanted}]")
    return given


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(given) != len(shape):
        return False
    return all(want in (None, size) for want, size in zip(shape, given, strict=True))
