"""The carriers that an operator allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.v1 import draft_pb2 as pb

# Best first.
_NAMES = {"cuda_ipc": pb.CARRIER_CUDA_IPC, "shm": pb.CARRIER_SHM, "bytes": pb.CARRIER_BYTES}
ALL_CARRIERS = tuple(_NAMES.values())


def parse_carriers(text: str) -> tuple[pb.Carrier, ...]:
    """Return the carriers of "auto" or of a list such as "shm,bytes", best first, bytes in the message included.

    Raises:
        InvalidArgumentError: If the list names an unknown carrier.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in _NAMES]
    if unknown and names != ["auto"]:
        raise InvalidArgumentError("carriers", text, f"allowed: auto, or a list of {', '.join(_NAMES)}")
    return tuple(carrier for name, carrier in _NAMES.items() if name in names or unknown or name == "bytes")


def offered_carriers(allowed: Sequence[pb.Carrier], device: torch.device) -> list[pb.Carrier]:
    """Return those of `allowed` that tensors of `device` can take, best first."""
    return [carrier for carrier in allowed if carrier != pb.CARRIER_CUDA_IPC or device.type == "cuda"]


def carrier_name(carrier: int) -> str:
    """Return the name of a carrier as in the option, or its number if it has no name."""
    return next((name for name, value in _NAMES.items() if value == carrier), str(carrier))
