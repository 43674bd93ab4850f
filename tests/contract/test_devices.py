"""`check_context` raises an error if the CUDA context is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftwire.model.devices import check_context

PROGRAM = """
import torch
from draftwire.model.devices import check_context

device = torch.device("cuda", 0)
with torch.cuda.stream(torch.cuda.Stream(device)):
    torch.cuda._sleep(1_000_000_000)
    check_context(device)
    print("busy", not torch.cuda.current_stream(device).query())
    torch.cuda.synchronize(device)
    torch.zeros(4, device=device)[torch.tensor([9], device=device)]
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        print("failed")
    try:
        check_context(device)
    except RuntimeError:
        print("lost")
"""


def test_a_cpu_is_never_lost() -> None:
    check_context(torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_is_lost_by_what_fails_on_it_and_not_by_being_busy() -> None:
    """The program runs in a separate process, which cannot use the GPU afterwards."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=200)
    assert ended.stdout.split() == ["busy", "True", "failed", "lost"]
