"""Checks of arguments' shapes, dtypes and devices, and of values that are on the host."""

import os
from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Collection[torch.dtype],
    devices: Collection[torch.device],
) -> None:
    """Raise ValueError unless `value` is a tensor with this shape (a str is a free size), dtype and device."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a tensor {_shape_text(shape)}")
    if value.ndim != len(shape) or any(isinstance(s, int) and s != v for s, v in zip(shape, value.shape, strict=True)):
        raise ValueError(f"{name}: got shape {list(value.shape)}, expected {_shape_text(shape)}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: got dtype {value.dtype}, expected {_join(dtypes)}")
    if value.device not in devices:
        raise ValueError(f"{name}: got device {value.device}, expected {_join(devices)}")


def check_logits(name: str, value: object) -> Tensor:
    """Raise ValueError unless `value` is a non-empty matrix of logits; return it."""
    check_tensor(name, value, ("rows", "V"), LOGIT_DTYPES, [value.device] if isinstance(value, Tensor) else [])
    assert isinstance(value, Tensor)
    if value.shape[1] == 0:
        raise ValueError(f"{name}: got shape {list(value.shape)}, expected at least one column")
    return value


def check_cu_rows(cu_rows: object, num_rows: int, device: torch.device, what: str = "rows of logits") -> int:
    """Return B; raise ValueError unless `cu_rows` is [B + 1] int32 for `num_rows` rows, called `what` in the message.
    Values are checked only on the CPU."""
    check_tensor("cu_rows", cu_rows, ("B + 1",), (torch.int32,), host_or(device))
    assert isinstance(cu_rows, Tensor)
    num_requests = cu_rows.shape[0] - 1
    if not 1 <= num_requests <= num_rows:
        raise ValueError(
            f"cu_rows: got {cu_rows.shape[0]} entries, expected B + 1 for 1 <= B <= {num_rows}, the {what}"
        )
    if cu_rows.device.type == "cpu":
        values = cu_rows.tolist()
        increasing = all(a < b for a, b in pairwise(values))
        if values[0] != 0 or values[-1] != num_rows or not increasing:
            raise ValueError(f"cu_rows: got {values}, expected increasing values from 0 to {num_rows} ({what})")
    return num_requests


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the backend to use, "reference" or "triton"; raise ValueError if `backend` is unknown or cannot run."""
    check_choice("backend", backend, ("auto", "reference", "triton"))
    if backend == "auto":
        return "triton" if device.type == "cuda" and _has_triton() else "reference"
    if backend == "triton":
        if not _has_triton():
            raise ValueError("backend: got 'triton', expected 'auto' or 'reference': triton is not installed")
        if device.type != "cuda" and not _is_interpreted():
            raise ValueError(
                f"backend: got 'triton' with tensors on {device}, expected tensors on CUDA, or TRITON_INTERPRET=1"
            )
    return backend


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def host_or(device: torch.device) -> tuple[torch.device, ...]:
    """Return the devices of an argument that may be on the host."""
    return (device, torch.device("cpu"))


def _shape_text(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _join(values: Collection[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))
