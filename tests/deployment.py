"""Files of deploy/ and commands of docs/deploy.md."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"


def read(path: str) -> Any:
    """Return the content of a YAML file of deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def script(path: str) -> ModuleType:
    """Import a script of deploy/ as a module, without running its main part."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DEPLOY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def services(name: str) -> dict[str, Any]:
    """Return the services of a compose file."""
    return read(f"{name}.yml")["services"]


def arguments(command: str) -> list[str]:
    """Return the arguments of a compose file's command, with the defaults of its variables."""
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command))


def walk_through(section: str) -> str:
    """Return the first block of shell commands in a section of docs/deploy.md."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    return re.search(rf"^## {section}$.*?^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
