"""Errors of Triton's compiler that its interpreter does not raise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_specialisation_passes_tritons_front_end() -> None:
    script = Path(__file__).with_name("ahead_of_time.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, script, "--front-end"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "block top-n fp64" in result.stdout
