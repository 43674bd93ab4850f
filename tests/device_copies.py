"""Copies between a GPU and the host, counted by the driver's own record."""

from torch.profiler import profile


def copies_to_host(run: profile) -> int:
    """How many copies from the device to the host were made while `run` recorded the device."""
    return sum(event.count for event in run.key_averages() if event.key.startswith("Memcpy DtoH"))
