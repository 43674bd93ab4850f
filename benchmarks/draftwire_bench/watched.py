"""Runs a command with instrumented processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HOOK = Path(__file__).resolve().parent / "hook"


def run_watched(command: Sequence[str], variable: str, output: Path) -> int:
    """Run a command and return its exit status.

    The command's Python processes import hook/sitecustomize.py, which selects the instrumentation by the environment
    variable's name and writes to `output`, the variable's value.
    """
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path, variable: str(output)}).returncode
