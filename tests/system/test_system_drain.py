"""Services ended by a signal: running requests finish, new ones are refused, and the exit status is 0."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from addresses import free_address
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import DEMO, crowd, drafted_share, drafter_status, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.contract.client_security import LOOPBACK, open_channel
from draftwire.contract.errors import RequestError
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("drain")

PROMPT = "def read_lines(path):\n"
# Long enough to be still running when the signal arrives.
LONG = {"temperature": 0, "max_tokens": 600, "ignore_eos": True, "num_speculative_tokens": 0}
EXIT_S = 60.0


@contextmanager
def ended(process: ServiceProcess) -> Iterator[ServiceProcess]:
    """Kill the process on exit."""
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def greedy(references):
    """Prompts and their greedy continuations by transformers."""
    return references("llama").continuations


def test_a_drafter_that_ends_loses_no_request(shelf, greedy, tmp_path):
    target, head = shelf.target("llama"), shelf.head("llama", "good")
    addresses = [free_address(), free_address()]
    first, second = (
        start_drafter(head, target, "--device", "cpu", "--listen", address, log_path=tmp_path / f"drafter-{i}.log")
        for i, address in enumerate(addresses)
    )
    options = ("--device", "cpu", "--draft-deadline-ms", "off")
    verifier = start_verifier(target, addresses, *options, log_path=tmp_path / "verifier.log")
    with ended(first), ended(second), ended(verifier), Client(verifier.address) as client, ThreadPoolExecutor(1) as one:
        for address in addresses:
            wait_for_drafter(client, address)
        calls = [(c.prompt, {"temperature": 0, "max_tokens": 48, "num_speculative_tokens": 4}) for c in greedy]
        running = one.submit(crowd, client, 4 * calls)
        wait_for(
            lambda: all(drafter_status(client, address).sequences > 1 for address in addresses),
            "sequences draft at both",
        )
        assert not running.done()
        first.send_signal(signal.SIGTERM)
        assert first.wait(EXIT_S) == 0
        assert "sessions that are left" not in first.log_text()
        assert [list(c.token_ids) for c in running.result()] == 4 * [c.tokens for c in greedy]
        assert drafter_status(client, addresses[0]).state == pb.DRAFTER_STATE_CONNECTING
        assert drafted_share(crowd(client, calls)) > 0.5


def test_an_ending_verifier_refuses_new_and_finishes_running(tmp_path):
    verifier = start_verifier(DEMO / "target", [], "--device", "cpu", log_path=tmp_path / "verifier.log")
    with ended(verifier), Client(verifier.address) as client, open_channel(verifier.address, LOOPBACK, ()) as channel:
        stream = client.generate(PROMPT, **LONG)
        chunks = [next(stream)]
        verifier.send_signal(signal.SIGTERM)
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        wait_for(lambda: health.Check(health_pb2.HealthCheckRequest()).status != serving, "health says so")
        with pytest.raises(RequestError, match="the server is draining") as refused:
            client.complete(PROMPT, max_tokens=1)
        assert refused.value.status == "UNAVAILABLE"
        chunks += stream
        assert sum(len(chunk.token_ids) for chunk in chunks) == LONG["max_tokens"]
        assert chunks[-1].finish_reason == "length"
        assert verifier.wait(EXIT_S) == 0


def test_an_ending_verifier_gives_requests_its_drain_timeout(tmp_path):
    options = ("--device", "cpu", "--drain-timeout", "0.2")
    verifier = start_verifier(DEMO / "target", [], *options, log_path=tmp_path / "verifier.log")
    with ended(verifier), Client(verifier.address) as client:
        streams = [client.generate(PROMPT, **LONG) for _ in range(4)]
        for stream in streams:
            next(stream)
        verifier.send_signal(signal.SIGINT)
        for stream in streams:
            with pytest.raises(RequestError, match=r"gave this request 0\.2 s to end") as cut:
                list(stream)
            assert cut.value.status == "UNAVAILABLE"
        assert verifier.wait(EXIT_S) == 0
