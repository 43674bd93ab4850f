"""The command `draftwire`."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import click

from draftwire.errors import DraftwireError, InvalidArgumentError
from draftwire.version import VERSION

INTERRUPTED = 130


class _Source(NamedTuple):
    """Where a command lives and what the list of commands says of it."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "generate": _Source("draftwire.cli.generate", "generate", "Generate text from a prompt."),
    "demo": _Source("draftwire.cli.demo", "demo", "Run the demo pair with drafting on and off."),
    "drafter": _Source("drafter_service.cli", "drafter", "Serve drafts from an EAGLE head."),
    "verifier": _Source("verifier_service.cli", "verifier", "Serve generation from a target model."),
}


class WrongCommand(click.ClickException):
    """A value that was given is not allowed."""

    exit_code = 2


class LazyGroup(click.Group):
    """Imports a command's module when the command is used, and tells errors as a command line should."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        source = COMMANDS.get(cmd_name)
        if source is None:
            return None
        command: click.Command = getattr(importlib.import_module(source.module), source.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, source.help) for name, source in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DraftwireError as error:
            kind = WrongCommand if isinstance(error, InvalidArgumentError) else click.ClickException
            raise kind(" ".join(str(error).split())) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="draftwire")
def main() -> None:
    """Speculative decoding served by two gRPC services."""
