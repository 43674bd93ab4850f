"""Prints the runtime dependencies of pyproject.toml, one a line."""

import tomllib
from pathlib import Path

for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
    print(requirement)
