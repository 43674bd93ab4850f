"""What the tests of the whole system share: pairs of processes, crowds of requests, transformers as the reference."""

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
# Scores nearer to each other than this are within rounding: verifying and decoding are products of different shapes.
ROUNDING = 2e-4


def drafter_status(client: Client, address: str) -> pb.DrafterStatus:
    """How the verifier sees the drafter at `address`."""
    return next(status for status in client.info().drafters if status.address == address)


def wait_for_drafter(client: Client, address: str, state: pb.DrafterState = pb.DRAFTER_STATE_READY) -> None:
    """Waits until the verifier sees the drafter in `state`."""
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
        """Has the drafter serve that head, None for no drafter."""
        if head != self._head or (self.drafter is not None and not self.drafter.running):
            self.kill_drafter()
            if head is not None:
                self.start_drafter(head)
                wait_for_drafter(self.client, self.drafter_address)

    def kill_drafter(self) -> None:
        """Ends the drafter, if there is one, as a crash would, and waits until the verifier has seen it."""
        if self.drafter is not None:
            self.drafter.kill()
            self.drafter, self._head = None, None
            wait_for_drafter(self.client, self.drafter_address, pb.DRAFTER_STATE_CONNECTING)

    def start_drafter(self, head: str) -> None:
        """Starts a drafter at the address that the verifier knows; it is healthy then, but perhaps not connected."""
        listen = ("--listen", self.drafter_address, "--device", "cpu")
        log = self._logs / f"drafter-{head}.log"
        self.drafter, self._head = start_drafter(self._heads[head], self.target, *listen, log_path=log), head

    def stop(self) -> None:
        """Ends both at once; how they end orderly is tested with the processes."""
        self.client.close()
        for process in (self.verifier, self.drafter):
            if process is not None:
                process.kill()


Call = tuple[Sequence[int] | str, Mapping[str, Any]]


def crowd(client: Client, calls: Sequence[Call], at_once: int = 16) -> list[Completion]:
    """The completions of `calls` (prompt, options), `at_once` of them in flight: others join when some leave."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda call: client.complete(call[0], **call[1]), calls))


# The test pair's drafts are accepted at 0.18 to 0.29 in these tests, four drafts a step.
LEAST_ACCEPTANCE = 0.12


def acceptance_rate(completions: Sequence[Completion]) -> float:
    """Share of the verified drafts that were accepted."""
    drafted = sum(sum(completion.statistics.drafted) for completion in completions)
    assert drafted > 0, "no draft was verified"
    return sum(sum(completion.statistics.accepted) for completion in completions) / drafted


def drafted_share(completions: Sequence[Completion]) -> float:
    """Share of the output tokens that are accepted drafts."""
    flags = [flag for completion in completions for flag in completion.drafted]
    return sum(flags) / len(flags)


@dataclass(frozen=True)
class Continuation:
    """What transformers says after a prompt."""

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
    """Those in which no two scores at the top are within rounding of each other."""

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
        """The continuation, up to and with the end token, and the smallest distance of its two best scores."""
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
