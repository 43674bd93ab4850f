"""Options that both service commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from draftwire.contract.client_security import ClientSecurity
from draftwire.server.logs import FORMATS

F = TypeVar("F", bound=Callable[..., Any])

OTLP_ENDPOINT = click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Export OpenTelemetry traces there, OTLP over gRPC: https://HOST:4317. Default: what OTEL_* variables say.",
)

_OPTIONS = (
    click.option("--device", metavar="cpu|cuda[:INDEX]", help="Default: cuda where there is some, else cpu."),
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
        help="Serve Prometheus metrics there, by HTTPS with --tls-cert. Default: nowhere.",
    ),
    click.option(
        "--health-listen",
        metavar="HOST:PORT",
        help="Serve the gRPC health service alone there, in plain text, for probes without a certificate. "
        "Default: nowhere; --listen serves it too.",
    ),
    click.option(
        "--carriers",
        default="auto",
        show_default=True,
        metavar="auto|LIST",
        help="How tensors may travel between the services: some of cuda_ipc, shm, bytes. Bytes always may.",
    ),
    click.option(
        "--rendezvous-dir",
        envvar="DRAFTWIRE_RENDEZVOUS_DIR",
        type=click.Path(path_type=Path),
        help="Where both find each other's memory, in containers of one host. Default: in one network namespace.",
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


def service_options(command: F) -> F:
    """Add device, dtype, load format, metrics, health, carriers and the log's options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


FILE = click.Path(dir_okay=False, path_type=Path)

_SERVER_SECURITY = (
    click.option(
        "--tls-cert",
        type=FILE,
        help="Certificate chain of this server, PEM; turns TLS on, on every port but that of --health-listen.",
    ),
    click.option("--tls-key", type=FILE, help="Its private key, PEM."),
    click.option("--tls-client-ca", type=FILE, help="Authorities whose clients are let in, PEM; asks for mutual TLS."),
    click.option("--insecure", is_flag=True, help="Allow plain text outside of the loopback interface."),
)
_CLIENT_SECURITY = (
    click.option("--tls", is_flag=True, help="Encrypt, trusting the system's authorities."),
    click.option("--tls-ca", type=FILE, help="Authorities that are trusted, PEM; turns TLS on."),
    click.option("--tls-cert", type=FILE, help="Own certificate for mutual TLS, PEM."),
    click.option("--tls-key", type=FILE, help="Its private key, PEM."),
    click.option("--token-file", type=FILE, help="File with the bearer token.  [default: DRAFTWIRE_TOKEN]"),
    click.option("--insecure", is_flag=True, help="Allow plain text outside of the loopback interface."),
)


def server_security_options(command: F) -> F:
    """Add the options of `ServerSecurity` but for the tokens."""
    for option in reversed(_SERVER_SECURITY):
        command = option(command)
    return command


def client_security_options(command: F) -> F:
    """Add the options of `ClientSecurity`."""
    for option in reversed(_CLIENT_SECURITY):
        command = option(command)
    return command


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
