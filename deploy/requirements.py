"""Prints what an image installs of pyproject.toml, one requirement a line.

The services' images: the dependencies, and those of traces. With the argument `gateway`: smg alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
optional = project["optional-dependencies"]
if sys.argv[1:] == ["gateway"]:
    requirements = [requirement for requirement in optional["gateway"] if requirement.startswith("smg")]
else:
    requirements = [*project["dependencies"], *optional["tracing"]]
print("\n".join(requirements))
