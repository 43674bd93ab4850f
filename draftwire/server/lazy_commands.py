"""Groups of commands whose modules are imported when the commands are used."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import click

from draftwire.contract.errors import DraftwireError, InvalidArgumentError

INTERRUPTED = 130


@contextmanager
def importing() -> Iterator[None]:
    """Import a service's modules, torch and transformers among them, without garbage collection. The modules stay for
    the life of the process, so the garbage collector does not traverse them later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Source(NamedTuple):
    """Module and short help of a command."""

    module: str
    attribute: str
    help: str


class WrongCommand(click.ClickException):
    """A given value is not allowed."""

    exit_code = 2


class LazyGroup(click.Group):
    """Import a command's module when the command is used; print errors in one line."""

    def __init__(self, *args: Any, sources: Mapping[str, Source], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sources = sources

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._sources)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        source = self._sources.get(cmd_name)
        if source is None:
            return None
        command: click.Command = getattr(importlib.import_module(source.module), source.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, source.help) for name, source in self._sources.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DraftwireError as error:
            kind = WrongCommand if isinstance(error, InvalidArgumentError) else click.ClickException
            raise kind(" ".join(str(error).split())) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
