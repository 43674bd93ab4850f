"""Options shared by commands of `draftwire bench`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from draftwire_bench.services import PairOptions

F = TypeVar("F", bound=Callable[..., Any])


class Numbers(click.ParamType):
    """N,N,..., each positive, or at least `least`."""

    name = "n,n,..."

    def __init__(self, kind: type[int] | type[float], least: int | None = None) -> None:
        self._kind, self._least = kind, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(self._is_allowed(number) for number in numbers):
            allowed = "above 0" if self._least is None else f"from {self._least} on"
            self.fail(f"{value!r} is not a list of numbers {allowed}, as in 1,8,64", param, ctx)
        return numbers

    def _is_allowed(self, number: float) -> bool:
        return (number > 0 if self._least is None else self._least <= number) and number < float("inf")


_PAIR_OPTIONS = (
    click.option("--target", metavar="DIR|ID", help="Start both services with this target."),
    click.option("--head", metavar="DIR|ID", help="Start the drafter with this head."),
    click.option("--verifier-device", metavar="cpu|cuda[:INDEX]", help="By default as in `draftwire verifier`."),
    click.option("--drafter-device", metavar="cpu|cuda[:INDEX]", help="By default as in `draftwire drafter`."),
    click.option("--dtype", default="auto", show_default=True, help="Compute type of both."),
    click.option(
        "--load-format",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "dummy"]),
        help="dummy: random weights with the shapes in config.json.",
    ),
    click.option("--quantization", type=click.Choice(["fp8"]), help="Of the drafter's head."),
    click.option("--verifier-args", default="", metavar="ARGS", help="Further arguments of `draftwire verifier`."),
    click.option("--drafter-args", default="", metavar="ARGS", help="Further arguments of `draftwire drafter`."),
)


def pair_options(command: F) -> F:
    """Add the options for starting both services."""
    for option in reversed(_PAIR_OPTIONS):
        command = option(command)
    return command


def pair_from(given: dict[str, Any]) -> PairOptions:
    """Remove the options of `pair_options` from `given` and return them.

    Raises:
        UsageError: If target or head is missing.
    """
    if not (given["target"] and given["head"]):
        raise click.UsageError("needs --target and --head")
    return PairOptions(
        verifier_arguments=shlex.split(given.pop("verifier_args")),
        drafter_arguments=shlex.split(given.pop("drafter_args")),
        **{name: given.pop(name) for name in ("target", "head", "verifier_device", "drafter_device")},
        **{name: given.pop(name) for name in ("dtype", "load_format", "quantization")},
    )
