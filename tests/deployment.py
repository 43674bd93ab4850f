"""What deploy/ and docs/deploy.md say."""

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
    """A YAML file of deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def script(path: str) -> ModuleType:
    """A script of deploy/, loaded without being run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DEPLOY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def services(name: str) -> dict[str, Any]:
    """The services of a compose file."""
    return read(f"{name}.yml")["services"]


def arguments(command: str) -> list[str]:
    """A command of a compose file, with the defaults of its variables."""
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command))


def walk_through(section: str) -> str:
    """The first shell commands of a section of docs/deploy.md."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    return re.search(rf"^## {section}$.*?^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
