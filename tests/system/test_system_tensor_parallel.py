"""The processes of a split target live and end together, whichever is ended and how."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_tree import all_ending

from draftwire import Client
from draftwire.contract.errors import RequestError
from draftwire_bench.processes import ServiceProcess, start_verifier

pytestmark = pytest.mark.xdist_group("tensor_parallel")

PROMPT = [5, 6, 7]
# Long enough to run when a process is ended, on any machine.
LONG = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
# Six processes start at once.
START_TIMEOUT_S = 240.0
HOW = ("asked to end", "rank 0 killed", "rank 1 killed")


@pytest.fixture(scope="module")
def verifiers(shelf) -> Iterator[dict[str, ServiceProcess]]:
    """A verifier of two ranks for each test, started side by side."""

    def start(_: str) -> ServiceProcess:
        options = ("--device", "cpu", "--tensor-parallel-size", "2", "--kv-cache-tokens", "1024")
        return start_verifier(shelf.target("random_llama"), [], *options, timeout_s=START_TIMEOUT_S)

    with ThreadPoolExecutor() as pool:
        started = dict(zip(HOW, pool.map(start, HOW), strict=True))
    yield started
    for process in started.values():
        process.kill()


def test_asked_to_end_all_ranks_finish_what_runs(verifiers):
    process = verifiers["asked to end"]
    with all_ending(process) as rank, Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        chunks = [next(output)]
        # As a service manager that signals every process of the service.
        os.kill(rank, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        chunks += output
    assert sum(len(chunk.token_ids) for chunk in chunks) == LONG["max_tokens"]
    assert process.returncode == 0
    assert "CRITICAL" not in process.log_text()


def test_killed_rank_0_leaves_no_other(verifiers):
    process = verifiers["rank 0 killed"]
    with all_ending(process), Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        next(output)
        process.kill()
        with pytest.raises(RequestError):
            list(output)


def test_a_killed_rank_ends_the_verifier_and_the_log_names_it(verifiers):
    process = verifiers["rank 1 killed"]
    with all_ending(process) as rank, Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        next(output)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RequestError):
            list(output)
    assert process.wait(30) == 1
    expected = f"rank 1 of 2 (process {rank}) ended with status -9, and the verifier with it"
    assert expected in process.log_text()
