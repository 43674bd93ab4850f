"""Options of structured output for the commands that send requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from draftwire.client import StructuredOutput
from draftwire.contract.structured_output import KINDS


class TextOrFile(click.ParamType):
    """A text, or @PATH for the text of a file."""

    name = "text or @file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(value)
        if not text.startswith("@"):
            return text
        try:
            return Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{text[1:]!r} cannot be read: {error}", param, ctx)


def structured_output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each kind of structured output."""
    options = [
        click.option("--json-schema", type=TextOrFile(), help="The output is JSON with this schema."),
        click.option("--json-object", is_flag=True, help="The output is a JSON object."),
        click.option("--regex", type=TextOrFile(), help="The output matches this regular expression."),
        click.option("--grammar", type=TextOrFile(), help="The output follows this grammar, EBNF or Lark."),
        click.option("--choice", multiple=True, metavar="TEXT", help="The output is one of these texts; repeatable."),
        click.option("--structural-tag", type=TextOrFile(), help="The output has tagged parts, defined by this JSON."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_structured_output(given: dict[str, Any]) -> StructuredOutput | None:
    """Remove the options of `structured_output_options` from `given` and return their value; None without one.

    Raises:
        click.UsageError: If several are given.
    """
    values = {kind: value for kind in KINDS if (value := given.pop(kind)) not in (None, False, ())}
    if len(values) > 1:
        names = ", ".join(f"--{kind.replace('_', '-')}" for kind in values)
        raise click.UsageError(f"at most one kind of structured output is allowed, got {names}")
    return values or None  # type: ignore[return-value]
