"""The gateway smg in front of two verifiers with a drafter each: local processes with the demo pair on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from draftwire.client import Client
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.gateway_process import GatewayProcess
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from draftwire_bench.services import wait_for_drafters
from draftwire_cli.demo_run import CPU, MODELS

pytest.importorskip("smg", reason="needs the gateway: pip install '.[gateway]'")
pytest.importorskip("openai", reason="needs openai: pip install '.[gateway]'")

START_TIMEOUT_S = 300.0


@dataclass
class Fleet:
    """A gateway and the verifiers behind it."""

    gateway: GatewayProcess
    verifiers: list[ServiceProcess]
    clients: list[Client]

    @property
    def url(self) -> str:
        return self.gateway.api_url

    def infos(self) -> list[pb.GetVerifierInfoResponse]:
        return [client.info() for client in self.clients]

    def running(self) -> list[int]:
        """Return the number of running requests of each verifier."""
        return [info.requests_running for info in self.infos()]


@contextlib.contextmanager
def start_fleet(*gateway_arguments: str) -> Iterator[Fleet]:
    """Start two drafters, a verifier for each of them, and the gateway."""
    with contextlib.ExitStack() as stack:
        head, target = MODELS / "demo" / "eagle3", MODELS / "demo" / "target"
        drafters = [stack.enter_context(start_drafter(head, target, *CPU, timeout_s=START_TIMEOUT_S)) for _ in range(2)]
        verifiers, clients = [], []
        for drafter in drafters:
            arguments = (*CPU, "--served-model-name", "demo", "--max-num-seqs", "128", "--kv-events")
            verifier = start_verifier(target, [drafter.address], *arguments, timeout_s=START_TIMEOUT_S)
            verifiers.append(stack.enter_context(verifier))
            clients.append(stack.enter_context(Client(verifier.address)))
            wait_for_drafters(clients[-1])
        addresses = [verifier.address for verifier in verifiers]
        gateway = stack.enter_context(GatewayProcess(addresses, *gateway_arguments, timeout_s=START_TIMEOUT_S))
        yield Fleet(gateway, verifiers, clients)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """A fleet for all tests that end none of its processes."""
    with start_fleet() as started:
        yield started


@pytest.fixture
def own_fleet() -> Iterator[Fleet]:
    """A fleet for a test that ends processes."""
    with start_fleet() as started:
        yield started
