"""Runs a command whose processes are watched from within."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HOOK = Path(__file__).resolve().parent / "hook"


def run_watched(command: Sequence[str], variable: str, output: Path) -> int:
    """Return the command's exit status. Its Python processes import hook/sitecustomize.py, which knows by the
    environment variable what to watch, and write to `output`."""
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path, variable: str(output)}).returncode
