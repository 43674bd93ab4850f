"""The command `draftwire demo`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from draftwire_cli.demo_run import PAIRS, run_demo


@click.command()
@click.option(
    "--pair",
    type=click.Choice(sorted(PAIRS)),
    default="smollm2",
    show_default=True,
    help="SmolLM2-135M-Instruct, downloaded once, or the tiny pair in the source tree, which writes Python.",
)
@click.option("--head", type=click.Path(path_type=Path), help="Directory of another head.")
@click.option("--target", type=click.Path(path_type=Path), help="Directory of another target.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Tokens for each prompt.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Number of prompts.")
def demo(pair: str, head: Path | None, target: Path | None, max_tokens: int, num_prompts: int) -> None:
    """Run a target with drafting on and off.

    Starts a drafter and a verifier on free local ports, on the CPU, and stops them at the end. Green text was drafted
    and accepted; the rest was sampled by the verifier. The exit code is 1 if drafting changed a greedy output.
    """
    console = Console(highlight=False)
    chosen = PAIRS[pair]
    if pair == "smollm2" and target is None:
        from draftwire_cli.smollm2 import ensure_smollm2  # loads torch

        ensure_smollm2(chosen.target, console)
    prompts = chosen.prompts[:num_prompts]
    if not run_demo(head or chosen.head, target or chosen.target, prompts, max_tokens, console):
        raise SystemExit(1)
