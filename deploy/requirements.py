"""Prints what the images install of pyproject.toml, one requirement a line: the dependencies, and those of traces."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["tracing"]]:
    print(requirement)
