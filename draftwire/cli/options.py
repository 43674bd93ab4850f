"""Options that both service commands have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--device", metavar="cpu|cuda[:INDEX]", help="Default: cuda where there is some, else cpu."),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Compute type. auto: the target's 16-bit type on cuda, float32 on cpu.",
    ),
    click.option(
        "--load-format",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "dummy"]),
        help="dummy: random weights, for benchmarks.",
    ),
    click.option(
        "--log-level",
        default="info",
        show_default=True,
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least severe messages that are logged.",
    ),
)


def service_options(command: F) -> F:
    """Adds device, dtype, load format and log level to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def start_logging(level: str) -> None:
    """Logs to standard error from `level` on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
