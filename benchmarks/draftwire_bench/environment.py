"""The environment of a measurement: machine, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftwire.contract.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
SHAPES = ROOT / "benchmarks" / "shapes"
PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy")


def describe() -> dict[str, Any]:
    """Return machine, versions, commit, date and the process's command line without its output files.

    The commit is $DRAFTWIRE_COMMIT, for machines without the git directory; by default the checkout's commit, with
    "-dirty" for changed files.
    """
    return {
        "command": shlex.join(_command()),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform(), "gpus": _gpus()},
        "versions": {"draftwire": VERSION, "python": platform.python_version(), **_versions()},
    }


def read_shape(directory: str) -> dict[str, Any] | None:
    """Return the config.json of a model directory; None for a hub id."""
    path = Path(directory).expanduser() / "config.json"
    if not path.is_file():
        return None
    shape: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return shape


def _command() -> list[str]:
    """Return the command as typed in a checkout: `draftwire` or a module of `draftwire_bench`."""
    program = Path(sys.argv[0]).resolve()
    is_script = program.suffix == ".py" and program.name != "__main__.py"
    called = ["python", "-m", f"{program.parent.name}.{program.stem}"] if is_script else ["draftwire"]
    given = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    return [*called, *(one for before, one in given if "--json" not in (before, one.partition("=")[0]))]


def _commit() -> str | None:
    given = os.environ.get("DRAFTWIRE_COMMIT")
    if given or not (ROOT / ".git").exists() or shutil.which("git") is None:
        return given
    describing = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    answer = subprocess.run(describing, capture_output=True, text=True, check=False, timeout=60)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    """Return name and driver of each GPU from nvidia-smi, which needs no CUDA context in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return answer.stdout.splitlines() if answer.returncode == 0 else []
