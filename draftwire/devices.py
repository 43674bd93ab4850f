"""Devices and number types given on the command line."""

from __future__ import annotations

from pathlib import Path

import torch

from draftwire.checkpoints import read_config
from draftwire.errors import InvalidArgumentError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device of `cpu`, `cuda`, `cuda:N` or `auto` (the first GPU if there is one).

    Raises
    ------
    InvalidArgumentError
        For another name or a GPU that is not there.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (name != "cuda" and not index.isdigit()):
        raise InvalidArgumentError("device", name, "allowed: cpu, cuda, cuda:N, auto")
    number = int(index or 0)
    if number >= count:
        raise InvalidArgumentError("device", name, f"this machine has {count} CUDA devices")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, directory: Path, device: torch.device) -> torch.dtype:
    """The type of `float32`, `bfloat16`, `float16` or `auto`: float32 on a CPU, else as the checkpoint was saved.

    Raises
    ------
    InvalidArgumentError
        For another name.
    """
    if name == "auto":
        config = read_config(directory)
        saved = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        name = "float32" if device.type == "cpu" else str(saved)
    if name not in DTYPES:
        raise InvalidArgumentError("dtype", name, f"allowed: {', '.join(DTYPES)}, auto")
    return DTYPES[name]


def free_memory(device: torch.device) -> int:
    """Bytes free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]
