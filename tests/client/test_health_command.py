"""`draftwire health` against the standard health service."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwire_cli.main import main


@pytest.fixture
def server():
    served = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, served)
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield servicer, f"127.0.0.1:{port}"
    served.stop(None)


def test_a_server_that_serves_is_status_0(server):
    _, address = server
    result = CliRunner().invoke(main, ["health", "--server", address, "--timeout", "60"])
    assert (result.exit_code, result.output) == (0, f"{address} serves\n")


def test_a_server_that_stops_is_an_error(server):
    servicer, address = server
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    result = CliRunner().invoke(main, ["health", "--server", address, "--timeout", "60"])
    assert (result.exit_code, result.output) == (1, f"Error: {address} does not serve: NOT_SERVING\n")


def test_no_server_is_an_error():
    result = CliRunner().invoke(main, ["health", "--server", "127.0.0.1:1", "--timeout", "0.2"])
    assert (result.exit_code, result.output) == (1, "Error: 127.0.0.1:1 does not answer: DEADLINE_EXCEEDED\n")


def test_a_wrong_address_is_refused():
    result = CliRunner().invoke(main, ["health", "--server", "nowhere"])
    assert result.exit_code == 2
    assert "server = 'nowhere': must be HOST:PORT" in result.output
