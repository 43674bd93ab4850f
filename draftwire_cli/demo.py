"""The command `draftwire demo`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from draftwire_cli.demo_run import MODELS, run_demo


@click.command()
@click.option("--head", type=click.Path(path_type=Path), default=MODELS / "head", help="Directory of the EAGLE head.")
@click.option("--target", type=click.Path(path_type=Path), default=MODELS / "target", help="Directory of the target.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Tokens for each prompt.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Number of prompts.")
def demo(head: Path, target: Path, max_tokens: int, num_prompts: int) -> None:
    """Run the demo pair with drafting on and off.

    Starts a drafter and a verifier on free local ports, on the CPU, and stops them at the end. Green text is drafted
    and accepted, the rest is the verifier's own. Exit code 1 when drafting changed a greedy output.
    """
    if not run_demo(head, target, max_tokens, num_prompts, Console(highlight=False)):
        raise SystemExit(1)
