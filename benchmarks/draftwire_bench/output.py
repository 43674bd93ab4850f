"""The output that all benchmarks share: the console, tables and the result file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="File for the results."
)


def report_console() -> Console:
    """Return the console for results; in a file or a pipe, rows are not wrapped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=132)


def make_table(title: str, columns: Iterable[str], left: Iterable[str] = ()) -> Table:
    """Return an empty table; columns are aligned to the right and never wrapped, except those in `left`."""
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        is_left = column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=not is_left)
    return table


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a result file; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
