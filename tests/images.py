"""Commands, users and build arguments of the images, read from deploy/Dockerfile."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from drafter_service.cli import drafter
from verifier_service.cli import verifier

DOCKERFILE = (Path(__file__).resolve().parents[1] / "deploy" / "Dockerfile").read_text()
USER = int(re.search(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)[1])
COMMANDS = {"drafter": drafter, "verifier": verifier}


def build_argument(name: str) -> str:
    """Return the default of a build argument."""
    return re.search(rf'^ARG {name}="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE)[1]


def service_options(name: str, arguments: list[str]) -> dict:
    """Return the options of a service, parsed from the image's own arguments and these; unknown ones are refused."""
    stage = re.search(rf"^FROM service AS {name}$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    program, command, *own = json.loads(re.search(r"^ENTRYPOINT (.*)$", stage[1], re.MULTILINE)[1])
    assert (program, command) == ("draftwire", name)
    return options(COMMANDS[name], [*own, *arguments])


def options(command: click.Command, arguments: list[str]) -> dict:
    """Return the options that a command parses from its arguments."""
    return command.make_context(command.name, list(arguments)).params
