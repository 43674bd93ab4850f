"""Prints the requirements in pyproject.toml that an image installs, one per line.

The services' images install the dependencies and the extra `tracing`; with the argument `gateway`, only smg is printed.
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
