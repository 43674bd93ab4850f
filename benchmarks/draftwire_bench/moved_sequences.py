"""Acceptance before, during and after a move: one of two drafters stops while greedy requests run.

    python -m draftwire_bench.moved_sequences
    python -m draftwire_bench.moved_sequences --by drain

Runs the demo pair on the CPU and prints a table of tokens per verify step by the number of steps since the drafter's
SIGKILL, or since the SIGTERM that starts its drain, for the sequences of that drafter and for the others. The former
are opened at the other drafter with the features that the verifier has kept; the number of tokens without drafts is
printed too. Acceptance varies with the text, so the table also has the same tokens of a run without a move. There is no
draft deadline, so that the result does not depend on the machine's speed. The exit code is 1 if an output differs from
the output without drafts.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import click

from draftwire import Client
from draftwire.client import Options
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from draftwire_bench.services import NO_DEADLINE

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CPU = ("--device", "cpu")
NUM_DRAFTS = 4
LOGGED = ("--log-format", "json", "--log-level", "debug")  # logs which sequence is opened at which drafter
SIGNALS = {"kill": signal.SIGKILL, "drain": signal.SIGTERM}
# Steps since the drafter's end in each row of the table: first, and one past the last; None is unbounded.
WINDOWS: Sequence[tuple[int | None, int | None]] = ((None, 0), (0, 4), (4, 8), (8, 16), (16, 32), (32, None))


@dataclass(frozen=True)
class Step:
    """The tokens of one verify step of a request, and when they arrived."""

    at: float  # monotonic s
    first_token: int  # index in the output
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """Outputs and steps of all requests, by number."""

    outputs: list[list[int]]
    steps: list[list[Step]]


@click.command()
@click.option("--requests", "count", default=8, show_default=True)
@click.option("--max-tokens", default=1400, show_default=True)
@click.option("--by", type=click.Choice(list(SIGNALS)), default="kill", show_default=True)
def main(count: int, max_tokens: int, by: str) -> None:
    """Measure and print."""
    target, head = DEMO / "target", DEMO / "eagle3"
    with (
        tempfile.TemporaryDirectory(prefix="draftwire-moved-") as logs,
        start_drafter(head, target, *CPU) as first,
        start_drafter(head, target, *CPU) as second,
        start_verifier(
            target,
            [first.address, second.address],
            *(*CPU, *NO_DEADLINE, *LOGGED),
            log_path=Path(logs) / "verifier.log",
        ) as verifier,
        Client(verifier.address) as client,
    ):
        while not all(one.state == pb.DRAFTER_STATE_READY for one in client.info().drafters):
            time.sleep(0.05)
        alone = _run(client, "alone", count, max_tokens, num_drafts=0)
        undisturbed = _run(client, "undisturbed", count, max_tokens)
        times: list[float] = []
        undrafted: list[dict[str, int]] = []

        def end_first() -> None:
            undrafted.append(_undrafted(client))
            times.append(time.monotonic())
            first.send_signal(SIGNALS[by])

        run = _run(client, "moved", count, max_tokens, half_way=end_first)
        undrafted.append(_undrafted(client))
        moved = _moved(verifier, [f"moved-{number}" for number in range(count)])
    is_equal = alone.outputs == undisturbed.outputs == run.outputs
    print(f"{count} greedy requests, {sum(moved)} of them at the drafter that ends by a {by}\n")
    _print_table(run, undisturbed, times[0], moved, by)
    causes = {cause: tokens - undrafted[0].get(cause, 0) for cause, tokens in undrafted[1].items()}
    print("\ntokens without drafts since then:", ", ".join(f"{n} {cause}" for cause, n in causes.items() if n))
    print(f"output {'equal to' if is_equal else 'DIFFERENT from'} that without drafts")
    sys.exit(not is_equal)


def _run(
    client: Client,
    name: str,
    count: int,
    max_tokens: int,
    half_way: Callable[[], None] = lambda: None,
    num_drafts: int = NUM_DRAFTS,
) -> Run:
    """Run all requests concurrently, and call `half_way` when the first request has half of its tokens."""
    outputs: list[list[int]] = [[] for _ in range(count)]
    is_half_way = Event()

    def ask(number: int) -> list[Step]:
        steps = []
        prompt = PROMPTS[number % len(PROMPTS)]
        greedy: Options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        greedy["num_speculative_tokens"], greedy["request_id"] = num_drafts, f"{name}-{number}"
        for chunk in client.generate(prompt, **greedy):
            steps.append(Step(time.monotonic(), len(outputs[number]), len(chunk.token_ids)))
            outputs[number] += chunk.token_ids
            if number == 0 and len(outputs[0]) >= max_tokens // 2:
                is_half_way.set()
        return steps[1:]  # the prompt's step emits the first token

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(ask, number) for number in range(count)]
        is_half_way.wait()
        half_way()
        return Run(outputs, [one.result() for one in running])


def _undrafted(client: Client) -> dict[str, int]:
    """Return the number of tokens without drafts by cause."""
    counts = client.info().counters.fallbacks
    return {pb.FallbackCause.Name(one.cause).removeprefix("FALLBACK_CAUSE_").lower(): one.tokens for one in counts}


def _moved(verifier: ServiceProcess, request_ids: Sequence[str]) -> list[bool]:
    """Return whether each request's sequence was opened at two drafters."""
    lines = [json.loads(line) for line in verifier.log_text().splitlines() if line.startswith("{")]
    opened = {(one["request_id"], one["drafter"]) for one in lines if one["message"] == "sequence opened"}
    return [sum(request_id == name for request_id, _ in opened) > 1 for name in request_ids]


def _print_table(run: Run, undisturbed: Run, ended: float, moved: Sequence[bool], by: str) -> None:
    print(f"| steps since the {by} | moved: steps | tokens per step | without a {by} ", end="")
    print(f"| others: steps | tokens per step | without a {by} |\n|---|---:|---:|---:|---:|---:|---:|")
    for low, high in WINDOWS:
        cells = [_name(low, high)]
        for is_moved in (True, False):
            own: list[Step] = []
            same_text: list[Step] = []
            for number in itertools.compress(range(len(moved)), [one is is_moved for one in moved]):
                steps = _window(run.steps[number], ended, low, high)
                own += steps
                if steps:
                    first, end = steps[0].first_token, steps[-1].first_token + steps[-1].num_tokens
                    same_text += [one for one in undisturbed.steps[number] if first <= one.first_token < end]
            cells += [str(len(own)), _mean(own), _mean(same_text)]
        print(f"| {' | '.join(cells)} |")


def _window(steps: Sequence[Step], ended: float, low: int | None, high: int | None) -> Sequence[Step]:
    first = sum(step.at < ended for step in steps)
    return steps[0 if low is None else first + low : None if high is None else first + high]


def _mean(steps: Sequence[Step]) -> str:
    return f"{sum(one.num_tokens for one in steps) / len(steps):.2f}" if steps else "-"


def _name(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return "before" if low is None else f"{low} and more"
    return f"{low} to {high - 1}"


if __name__ == "__main__":
    main()
