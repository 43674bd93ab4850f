"""Command-line options that commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from draftwire.contract.client_security import ClientSecurity
from draftwire.server.logs import FORMATS

F = TypeVar("F", bound=Callable[..., Any])

OTLP_ENDPOINT = click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Export OpenTelemetry traces to this URL, OTLP over gRPC: https://HOST:4317. Default: the OTEL_* variables.",
)

_OPTIONS = (
    click.option("--device", metavar="cpu|cuda[:INDEX]", help="Default: cuda if available, else cpu."),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Compute type. auto: the target's 16-bit type on cuda, float32 on cpu.",
    ),
    click.option(
        "--load-format",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "dummy"]),
        help="dummy: random weights, for benchmarks.",
    ),
    click.option(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="Serve Prometheus metrics at this address, over HTTPS with --tls-cert. Default: off.",
    ),
    click.option(
        "--health-listen",
        metavar="HOST:PORT",
        help="Serve only the gRPC health service at this address, in plain text, for probes without a certificate. "
        "Default: off; --listen always serves it.",
    ),
    click.option(
        "--carriers",
        default="auto",
        show_default=True,
        metavar="auto|LIST",
        help="Allowed carriers of tensors between the services: cuda_ipc, shm, bytes. bytes is always allowed.",
    ),
    click.option(
        "--rendezvous-dir",
        envvar="DRAFTWIRE_RENDEZVOUS_DIR",
        type=click.Path(path_type=Path),
        help="Directory that both containers of one host mount, to share memory. "
        "Default: services of one network namespace need none.",
    ),
    click.option(
        "--log-level",
        default="info",
        show_default=True,
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least severe messages that are logged.",
    ),
    click.option(
        "--log-format",
        default="text",
        show_default=True,
        type=click.Choice(FORMATS),
        help="json: one object a line.",
    ),
    OTLP_ENDPOINT,
)


FILE = click.Path(dir_okay=False, path_type=Path)

_SERVER_SECURITY = (
    click.option(
        "--tls-cert",
        type=FILE,
        help="Certificate chain of this server, PEM; turns TLS on, on every port but that of --health-listen.",
    ),
    click.option("--tls-key", type=FILE, help="Private key of the certificate, PEM."),
    click.option("--tls-client-ca", type=FILE, help="Authorities of clients, PEM; turns mutual TLS on."),
    click.option("--insecure", is_flag=True, help="Allow plain text outside of the loopback interface."),
)
_CLIENT_SECURITY = (
    click.option("--tls", is_flag=True, help="Encrypt, trusting the system's authorities."),
    click.option("--tls-ca", type=FILE, help="Trusted authorities, PEM; turns TLS on."),
    click.option("--tls-cert", type=FILE, help="Client certificate for mutual TLS, PEM."),
    click.option("--tls-key", type=FILE, help="Private key of the certificate, PEM."),
    click.option("--token-file", type=FILE, help="File with the bearer token.  [default: DRAFTWIRE_TOKEN]"),
    click.option("--insecure", is_flag=True, help="Allow plain text outside of the loopback interface."),
)


def _adding(options: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


service_options = _adding(_OPTIONS)  # of both services
server_security_options = _adding(_SERVER_SECURITY)  # of `ServerSecurity`, except its tokens
client_security_options = _adding(_CLIENT_SECURITY)  # of `ClientSecurity`


def client_security(given: dict[str, Any]) -> ClientSecurity:
    """Take the options of `client_security_options` out of a command's options."""
    return ClientSecurity(
        tls=given.pop("tls"),
        ca=given.pop("tls_ca"),
        certificate=given.pop("tls_cert"),
        key=given.pop("tls_key"),
        token_file=given.pop("token_file"),
        insecure=given.pop("insecure"),
    )
