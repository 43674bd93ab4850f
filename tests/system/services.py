"""Shared by the system tests: pairs of services, concurrent requests, transformers as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from addresses import free_address
from waiting import wait_for

from draftwire import Client
from draftwire.client import Completion
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from models import load_reference

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
# Rounding may swap logits closer than this: verify and decode steps multiply matrices of different shapes.
ROUNDING = 2e-4


def drafter_status(client: Client, address: str) -> pb.DrafterStatus:
    """Return the verifier's status of the drafter at `address`."""
    return next(status for status in client.info().drafters if status.address == address)


def wait_for_drafter(client: Client, address: str, state: pb.DrafterState = pb.DRAFTER_STATE_READY) -> None:
    """Wait until the verifier reports the drafter in `state`."""
    name = pb.DrafterState.Name(state)
    wait_for(lambda: drafter_status(client, address).state == state, f"{name} of the drafter at {address}")


class Pair:
    """A verifier and one drafter, whose head can be changed."""

    def __init__(self, target: Path, heads: Mapping[str, Path], logs: Path, deadline_ms: str = "off") -> None:
        self.target = target
        self._heads = heads
        self._logs = logs
        self.drafter_address = free_address()
        self.verifier = start_verifier(
            target,
            [self.drafter_address],
            *("--device", "cpu", "--draft-deadline-ms", deadline_ms, "--no-adaptive-k"),
            *("--speculative-config", '{"num_speculative_tokens": 7}'),
            log_path=logs / "verifier.log",
        )
        self.client = Client(self.verifier.address)
        self.drafter: ServiceProcess | None = None
        self._head: str | None = None

    def use(self, head: str | None) -> None:
        """Run the drafter with that head; None stops the drafter."""
        if head != self._head or (self.drafter is not None and not self.drafter.running):
            self.kill_drafter()
            if head is not None:
                self.start_drafter(head)
                wait_for_drafter(self.client, self.drafter_address)

    def kill_drafter(self) -> None:
        """Kill the drafter, if one runs, and wait until the verifier has noticed."""
        if self.drafter is not None:
            self.drafter.kill()
            self.drafter, self._head = None, None
            wait_for_drafter(self.client, self.drafter_address, pb.DRAFTER_STATE_CONNECTING)

    def start_drafter(self, head: str) -> None:
        """Start a healthy drafter at the address that the verifier knows; it may not be connected yet."""
        listen = ("--listen", self.drafter_address, "--device", "cpu")
        log = self._logs / f"drafter-{head}.log"
        self.drafter, self._head = start_drafter(self._heads[head], self.target, *listen, log_path=log), head

    def stop(self) -> None:
        """Kill both processes; other tests cover the orderly shutdown."""
        self.client.close()
        for process in (self.verifier, self.drafter):
            if process is not None:
                process.kill()


Call = tuple[Sequence[int] | str, Mapping[str, Any]]


def crowd(client: Client, calls: Sequence[Call], at_once: int = 16) -> list[Completion]:
    """Return the completions of `calls` (prompt, options), with at most `at_once` in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda call: client.complete(call[0], **call[1]), calls))


# In these tests 0.18 to 0.29 of the test pair's drafts are accepted, with four drafts a step.
LEAST_ACCEPTANCE = 0.12


def acceptance_rate(completions: Sequence[Completion]) -> float:
    """Return the share of verified drafts that were accepted."""
    drafted = sum(sum(completion.statistics.drafted) for completion in completions)
    assert drafted > 0, "no draft was verified"
    return sum(sum(completion.statistics.accepted) for completion in completions) / drafted


def drafted_share(completions: Sequence[Completion]) -> float:
    """Return the share of output tokens that are accepted drafts."""
    flags = [flag for completion in completions for flag in completion.drafted]
    return sum(flags) / len(flags)


@dataclass(frozen=True)
class Continuation:
    """A prompt and its greedy continuation by transformers."""

    prompt: list[int]
    tokens: list[int]


@dataclass
class Reference:
    """Greedy continuations by transformers' own generate, float32, eager attention."""

    directory: Path
    prompts: Sequence[Sequence[int]]
    length: int = 48
    model: Any = field(init=False)
    continuations: list[Continuation] = field(init=False)
    """Only continuations whose two best logits always differ by more than `ROUNDING`."""

    def __post_init__(self) -> None:
        self.model = load_reference(self.directory)
        found = [self.greedy(prompt, self.length) for prompt in self.prompts]
        self.continuations = [
            Continuation(list(prompt), tokens)
            for prompt, (tokens, margin) in zip(self.prompts, found, strict=True)
            if margin > ROUNDING
        ]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int) -> tuple[list[int], float]:
        """Return the continuation, including its end token, and the smallest gap between the two best logits."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        return out.sequences[0, ids.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())
