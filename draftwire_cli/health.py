"""The command `draftwire health`."""

from __future__ import annotations

from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.client.tls_mismatch import find_tls_mismatch
from draftwire.contract.addresses import parse_address
from draftwire.contract.client_security import open_channel
from draftwire.contract.errors import ServerError
from draftwire.server.cli_options import client_security, client_security_options


@click.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="A verifier or a drafter.")
@click.option("--timeout", default=3.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds.")
@client_security_options
def health(server: str, timeout: float, **given: Any) -> None:
    """Call the standard health service; exit with status 0 if the server serves."""
    parse_address(server, "server")
    security = client_security(given)
    with open_channel(server, security, ()) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            mismatch = find_tls_mismatch(server, security) or f"does not answer: {error.code().name}"
            raise ServerError(f"{server} {mismatch}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ServerError(f"{server} does not serve: {status}")
    click.echo(f"{server} serves")
