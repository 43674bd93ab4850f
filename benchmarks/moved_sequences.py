"""Acceptance before, during and after a move: one of two drafters is killed while greedy requests run.

    python benchmarks/moved_sequences.py

Runs the demo pair on the CPU and prints a table of tokens per verify step, by the number of steps since the kill. About
half of the sequences are at the drafter that is killed; they are opened at the other one from the features that the
verifier has kept. There is no draft deadline, so that the table does not tell how fast the machine is. Exit code 1 when
an output differs from the one without drafts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import click

from draftwire import Client
from draftwire.bench.services import NO_DEADLINE
from draftwire.client import Options
from draftwire.demo import PROMPTS
from draftwire.processes import start_drafter, start_verifier
from draftwire.v1 import generate_pb2 as pb

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
CPU = ("--device", "cpu")
# Steps since the kill, first and past the last, of each row of the table; None is open.
WINDOWS: Sequence[tuple[int | None, int | None]] = ((None, 0), (0, 4), (4, 8), (8, 16), (16, 32), (32, None))


@dataclass(frozen=True)
class Step:
    """What one verify step of a request emitted, and when it was received."""

    at: float  # monotonic s
    num_tokens: int


@click.command()
@click.option("--requests", "count", default=8, show_default=True)
@click.option("--max-tokens", default=400, show_default=True)
def main(count: int, max_tokens: int) -> None:
    """Measures and prints."""
    target, head = DEMO / "target", DEMO / "head"
    options: Options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
    with (
        start_drafter(head, target, *CPU) as first,
        start_drafter(head, target, *CPU) as second,
        start_verifier(target, [first.address, second.address], *CPU, *NO_DEADLINE) as verifier,
        Client(verifier.address) as client,
        ThreadPoolExecutor(count) as pool,
    ):
        while not all(one.state == pb.DRAFTER_STATE_READY for one in client.info().drafters):
            time.sleep(0.05)
        outputs: list[list[int]] = [[] for _ in prompts]
        half_way = [Event() for _ in prompts]

        def run(number: int) -> list[Step]:
            steps = []
            for chunk in client.generate(prompts[number], **options):
                outputs[number] += chunk.token_ids
                steps.append(Step(time.monotonic(), len(chunk.token_ids)))
                if len(outputs[number]) >= max_tokens // 2:
                    half_way[number].set()
            return steps[1:]  # the first token is the prompt's

        running = [pool.submit(run, number) for number in range(count)]
        half_way[0].wait()
        num_moved = next(one.sequences for one in client.info().drafters if one.address == first.address)
        killed = time.monotonic()
        first.kill()
        steps = [one.result() for one in running]
        without: Options = {**options, "num_speculative_tokens": 0}
        is_equal = all(
            list(client.complete(prompt, **without).token_ids) == output
            for prompt, output in zip(prompts, outputs, strict=True)
        )
    print(f"{count} greedy requests, {num_moved} of them at the drafter that is killed\n")
    print("| steps since the kill | steps | tokens per step |\n|---|---:|---:|")
    for low, high in WINDOWS:
        counts = [one.num_tokens for own in steps for one in _window(own, killed, low, high)]
        mean = f"{sum(counts) / len(counts):.2f}" if counts else "-"
        print(f"| {_name(low, high)} | {len(counts)} | {mean} |")
    print(f"\noutput {'equal to' if is_equal else 'DIFFERENT from'} that without drafts")
    sys.exit(not is_equal)


def _window(steps: Sequence[Step], killed: float, low: int | None, high: int | None) -> Sequence[Step]:
    first = sum(step.at < killed for step in steps)
    return steps[0 if low is None else first + low : None if high is None else first + high]


def _name(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return "before" if low is None else f"{low} and more"
    return f"{low} to {high - 1}"


if __name__ == "__main__":
    main()
