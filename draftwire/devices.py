"""Devices and compute types given on the command line."""

from __future__ import annotations

from pathlib import Path

import torch

from draftwire.checkpoints import read_config
from draftwire.errors import InvalidArgumentError, ServerError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str | None) -> torch.device:
    """The device of a name such as "cpu" or "cuda:1"; CUDA by default where there is some.

    Raises
    ------
    InvalidArgumentError
        When it is not a name of a device.
    ServerError
        When this machine has no such device.
    """
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if not (kind == "cuda" and (name == "cuda" or (index.isascii() and index.isdigit()))):
        raise InvalidArgumentError("device", name, "allowed: cpu, cuda, cuda:INDEX")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise ServerError(f"device = {name!r}: this machine has {count} CUDA devices")
    return torch.device("cuda", int(index or 0))


def make_current(device: torch.device) -> None:
    """Makes a GPU the calling thread's current one, which kernels are launched on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(name: str, device: torch.device, target_dir: Path) -> torch.dtype:
    """The compute type: for "auto" float32 on the CPU, else the target's own 16-bit type.

    Raises
    ------
    InvalidArgumentError
        When it is not a type that models compute in.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise InvalidArgumentError("dtype", name, f"allowed: auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    config = read_config(target_dir)
    saved = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return torch.float16 if saved == "float16" else torch.bfloat16


def free_memory(device: torch.device) -> int:
    """Bytes free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]
