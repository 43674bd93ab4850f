"""A DSpark head, alone and as the replacement of an EAGLE head: greedy output is the target's."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from addresses import free_address
from services import crowd, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.v1 import generate_pb2
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("block_heads")

DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 300,
    "num_target_layers": 7,
    "target_layer_ids": [0, 2, 3, 5],
    "mask_token_id": 299,
    "block_size": 7,
    "markov_rank": 8,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
GUMBEL = {"num_speculative_tokens": 7, "draft_sample_method": "gumbel", "draft_logits": "dense"}


class Processes:
    """A verifier with the addresses of two drafters, and the running drafters."""

    def __init__(self, target: Path, heads: dict[str, Path], logs: Path) -> None:
        self.addresses = {name: free_address() for name in heads}
        self._target, self._heads, self._logs = target, heads, logs
        self.running: dict[str, ServiceProcess] = {}
        self.verifier = start_verifier(
            target,
            list(self.addresses.values()),
            *("--device", "cpu", "--draft-deadline-ms", "off", "--no-adaptive-k"),
            *("--speculative-config", json.dumps(GUMBEL)),
            log_path=logs / "verifier.log",
        )
        self.client = Client(self.verifier.address)

    def start(self, name: str) -> None:
        """Start a drafter and wait until the verifier reports it ready."""
        options = ("--device", "cpu", "--listen", self.addresses[name])
        dummy = ("--load-format", "dummy") if name == "dspark" else ()
        log = self._logs / f"{name}.log"
        self.running[name] = start_drafter(self._heads[name], self._target, *options, *dummy, log_path=log)
        wait_for_drafter(self.client, self.addresses[name])

    def kill(self, name: str) -> None:
        """Kill a drafter and wait until the verifier has noticed."""
        self.running.pop(name).kill()
        wait_for_drafter(self.client, self.addresses[name], generate_pb2.DRAFTER_STATE_CONNECTING)

    def drafted(self, name: str) -> int:
        """Return the number of a drafter's drafts that were verified."""
        return drafter_status(self.client, self.addresses[name]).drafted

    def stop(self) -> None:
        self.client.close()
        for process in (self.verifier, *self.running.values()):
            process.kill()


@pytest.fixture(scope="module")
def verifier(shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    directory = tmp_path_factory.mktemp("block-heads")
    head = directory / "dspark"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(DSPARK), encoding="utf-8")
    running = Processes(shelf.target("llama"), {"eagle": shelf.head("llama", "good"), "dspark": head}, directory)
    yield running
    running.stop()


@pytest.fixture
def processes(verifier: Processes) -> Iterator[Processes]:
    """A verifier whose drafters do not run yet."""
    yield verifier
    for name in list(verifier.running):
        verifier.kill(name)


@pytest.fixture
def calls(references):
    """Requests, and their expected tokens by transformers."""
    continuations = references("llama").continuations[:10]
    asked = [(c.prompt, {"temperature": 0, "max_tokens": 24, "num_speculative_tokens": 7}) for c in continuations]
    return asked, [c.tokens[:24] for c in continuations]


def tokens(completions) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def test_greedy_output_with_a_dspark_head(processes: Processes, calls) -> None:
    asked, expected = calls
    processes.start("dspark")
    for _ in range(2):  # the second time, prompts and their features are in the prefix cache
        completions = crowd(processes.client, asked)
        assert tokens(completions) == expected
        assert min(sum(completion.statistics.drafted) for completion in completions) > 0
    without = crowd(processes.client, [(prompt, {**options, "num_speculative_tokens": 0}) for prompt, options in asked])
    assert tokens(without) == expected
    processes.kill("dspark")
    assert tokens(crowd(processes.client, asked)) == expected
    processes.start("dspark")
    before = processes.drafted("dspark")
    assert tokens(crowd(processes.client, asked)) == expected
    assert processes.drafted("dspark") > before


def test_a_dspark_head_replaces_an_eagle_head_without_downtime(processes: Processes, calls) -> None:
    """The old drafter ends while requests run; the requests move to the new one, whose head uses other features."""
    asked, expected = calls
    processes.start("eagle")
    assert tokens(crowd(processes.client, asked)) == expected
    processes.start("dspark")
    with ThreadPoolExecutor(1) as one:
        running = one.submit(crowd, processes.client, 6 * asked)
        wait_for(lambda: running.done() or min(map(processes.drafted, ("eagle", "dspark"))) > 0, "drafts of both heads")
        processes.running.pop("eagle").send_signal(signal.SIGTERM)
        assert tokens(running.result()) == 6 * expected
    before = processes.drafted("dspark")
    assert before > 0
    assert tokens(crowd(processes.client, asked)) == expected
    assert processes.drafted("dspark") > before
