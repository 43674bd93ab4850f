"""The demo: starts both services, runs a few prompts with drafting on and off, and compares the outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwire.client import Client, Completion, Options
from draftwire.client.request import ChatMessage, Prompt
from draftwire.contract.errors import CheckpointError
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.processes import start_drafter, start_verifier
from draftwire_bench.services import wait_for_drafters
from draftwire_cli.output import DRAFTED_COLOUR, rates_text, visible

MODELS = Path(__file__).resolve().parents[1] / "models"
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that returns the largest number of a list.",
    "What are three ways to save water at home?",
    "Write a short email that thanks a colleague for her help.",
)
CPU = ("--device", "cpu")
GREEDY: Options = {"temperature": 0.0}
SAMPLED: Options = {"temperature": 0.8, "seed": 1}


@dataclass(frozen=True, slots=True)
class DemoPair:
    """A target, a head for the target, and prompts that fit the target's training data."""

    target: Path
    head: Path
    prompts: Sequence[Prompt]


PAIRS = {
    "smollm2": DemoPair(
        MODELS / "smollm2" / "target",
        MODELS / "smollm2" / "eagle3",
        [[ChatMessage(role="user", content=question)] for question in QUESTIONS],
    ),
    "tiny": DemoPair(MODELS / "demo" / "target", MODELS / "demo" / "eagle3", PROMPTS),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with drafting on and off."""

    name: str
    prompt: Prompt
    options: Options
    on: Completion
    off: Completion

    @property
    def greedy(self) -> bool:
        """Return whether both outputs must be equal."""
        return self.options["temperature"] == 0

    @property
    def equal(self) -> bool:
        """Return whether both outputs are the same tokens."""
        return self.on.token_ids == self.off.token_ids


@contextmanager
def serving_demo(head: Path, target: Path, console: Console) -> Iterator[Client]:
    """Run both services, and yield a client once the drafter is accepted."""
    # Two processes share the machine; more threads than cores slow both down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    with console.status("starting the drafter") as status, start_drafter(head, target, *CPU) as drafter:
        status.update("starting the verifier")
        with start_verifier(target, [drafter.address], *CPU) as verifier, Client(verifier.address) as client:
            status.update("waiting for the drafter to be accepted")
            wait_for_drafters(client)
            status.stop()
            console.print(f"drafter on {drafter.address}, verifier on {verifier.address}\n")
            yield client


def run_demo(
    head: Path,
    target: Path,
    prompts: Sequence[Prompt],
    max_tokens: int,
    console: Console,
    serving: Callable[[Path, Path, Console], AbstractContextManager[Client]] = serving_demo,
) -> bool:
    """Run the demo with the services of `serving` and print it; return False if drafting changed a greedy output.

    Raises:
        CheckpointError: If a model does not exist.
        ServerError: If a service does not start or the drafter is not accepted.
    """
    for name, path in (("target", target), ("head", head)):
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{name} = {str(path)!r}: has no config.json; the demo's heads are in models/ of the source tree, "
                "set other models with --head and --target"
            )
    runs = [(f"{number}", prompt, GREEDY) for number, prompt in enumerate(prompts, start=1)]
    runs.append((f"1, T={SAMPLED['temperature']}", prompts[0], SAMPLED))
    with serving(head, target, console) as client:
        client.complete(prompts[0], temperature=0.0, max_tokens=8)  # warm-up
        comparisons = []
        for name, prompt, options in runs:
            with console.status(f"running prompt {name}"):
                comparison = compare(client, name, prompt, options, max_tokens)
            print_text(comparison, console)
            comparisons.append(comparison)
    console.print(_table(comparisons))
    return _print_verdict([c for c in comparisons if c.greedy], console)


def compare(client: Client, name: str, prompt: Prompt, options: Options, max_tokens: int) -> Comparison:
    """Run one prompt with the server's number of drafts and without drafts."""
    shared: Options = {**options, "max_tokens": max_tokens}
    without: Options = {**shared, "num_speculative_tokens": 0}
    off = client.complete(prompt, **without)
    return Comparison(name, prompt, options, on=client.complete(prompt, **shared), off=off)


def print_text(comparison: Comparison, console: Console) -> None:
    """Print a prompt and its output, with accepted drafts coloured."""
    how = "greedy" if comparison.greedy else "sampled"
    console.rule(f"prompt {comparison.name} ({how})", align="left")
    text = Text().append(_shown(comparison.prompt), style="dim")
    for piece, drafted in comparison.on.pieces():
        text.append(visible(piece), style=DRAFTED_COLOUR if drafted else "")
    console.print(text, soft_wrap=True)
    console.print()


def _shown(prompt: Prompt) -> str:
    """Return a prompt as text; of chat messages, the last one as a line."""
    return prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"  # type: ignore[index]


def _table(comparisons: Sequence[Comparison]) -> Table:
    title = "Drafting off and on; mean acceptance length, acceptance rate per position"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("prompt", no_wrap=True)
    for column in ("tok/s off", "tok/s on", "speed-up", "length", "per position"):
        table.add_column(column, justify="right", no_wrap=True)
    for comparison in comparisons:
        off, on = comparison.off.statistics, comparison.on.statistics
        table.add_row(
            comparison.name,
            f"{off.tokens_per_second:.1f}",
            f"{on.tokens_per_second:.1f}",
            f"{on.tokens_per_second / off.tokens_per_second:.2f}" if off.tokens_per_second else "-",
            f"{on.acceptance_length:.2f}" if on.acceptance_length else "-",
            rates_text(on),
        )
    return table


def _print_verdict(greedy: Sequence[Comparison], console: Console) -> bool:
    different = [c for c in greedy if not c.equal]
    if not different:
        console.print(f"greedy output is the same with and without drafts: {len(greedy)} of {len(greedy)} prompts")
        return True
    for comparison in different:
        pairs = zip(comparison.on.token_ids, comparison.off.token_ids, strict=False)
        position = next((i for i, (on, off) in enumerate(pairs) if on != off), "its end")
        console.print(f"greedy output CHANGED with drafts, from token {position} on: {_shown(comparison.prompt)!r}")
    return False
