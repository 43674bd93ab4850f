"""Devices: choice, compute type, memory, and copies to a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.model.checkpoints import read_config

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str | None) -> torch.device:
    """Return the device of a name such as "cpu" or "cuda:1"; None takes CUDA if available, else the CPU.

    Raises:
        InvalidArgumentError: If `name` is not the name of a device.
        ServerError: If this machine has no such device.
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
    """Make a GPU the current device of the calling thread, for its launches."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check_context(device: torch.device) -> None:
    """Raise RuntimeError if the process' CUDA context is lost, for example after an illegal access. Does not wait."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def choose_dtype(name: str, device: torch.device, target_dir: Path) -> torch.dtype:
    """Return the compute type: for "auto" float32 on the CPU, else the target's own 16-bit type.

    Raises:
        InvalidArgumentError: If `name` is neither "auto" nor a compute type.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise InvalidArgumentError("dtype", name, f"allowed: auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    config = read_config(target_dir)
    saved = config.get("dtype")
    saved = str(config.get("torch_dtype") if saved is None else saved).removeprefix("torch.")
    return torch.float16 if saved == "float16" else torch.bfloat16


class GpuMemory:
    """Measures the memory that this process uses of a GPU, to size a cache with the rest of its share.

    Create it before anything is loaded: memory in use by then belongs to other processes and to the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, self.total = torch.cuda.mem_get_info(device)
        self._foreign = self.total - free - torch.cuda.memory_reserved(device)

    def left_for_cache(self, utilization: float, largest_step: Callable[[], object]) -> int:
        """Return the bytes left for the cache after all else was loaded, at most the free memory.

        Args:
            utilization: Share of the GPU's memory that the process may take, (0, 1].
            largest_step: Runs the largest step that the limits allow. Memory for its activations stays free twice,
                because captured graphs have their own activations.

        Raises:
            ServerError: If there is no memory for the step itself.
        """
        torch.cuda.empty_cache()
        loaded = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            largest_step()
        except torch.OutOfMemoryError as error:
            message = f"{self._device}: no memory for the largest step that the limits allow: {error}"
            raise ServerError(message) from error
        torch.cuda.synchronize(self._device)
        activations = torch.cuda.max_memory_reserved(self._device) - loaded
        free = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device) - loaded
        libraries = max(0, self.total - free - loaded - self._foreign)
        share = int(utilization * self.total)
        left = max(0, min(share - loaded - libraries, free) - 2 * activations)
        logger.info(
            "%s: share %.2f GiB; loaded %.2f, libraries %.2f, activations 2 x %.2f, left for the cache %.2f",
            self._device,
            *(size / 2**30 for size in (share, loaded, libraries, activations, left)),
        )
        return left


def awake_s(device: torch.device) -> float:
    """Return the seconds that an idle engine's thread polls before it sleeps; 0 on a CPU, which needs its cores."""
    return 0.02 if device.type == "cuda" else 0.0


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record a timed event on the device's current stream and return it; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


_ALIGNMENT = 16


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one asynchronous copy and return the tensors; on the CPU they share memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    staged = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    view = staged.numpy()
    for start, array in zip(starts, arrays, strict=False):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]
