"""A service checks its ports and files before it loads a model."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from drafter_service.cli import drafter
from draftwire.contract.errors import DraftwireError, InvalidArgumentError, ServerError
from draftwire.server.ports import check_ports
from verifier_service.cli import verifier

COMMANDS = [(verifier, ()), (drafter, ("--head", "./missing"))]


@pytest.fixture
def busy() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_in_use_is_named(busy: str) -> None:
    with pytest.raises(ServerError, match=f"metrics_listen = '{busy}': cannot be bound: the port is in use"):
        check_ports(listen="127.0.0.1:0", metrics_listen=busy)


def test_a_free_port_and_no_address_pass() -> None:
    check_ports(listen="127.0.0.1:0", metrics_listen=None)
    check_ports(listen="localhost:0")
    check_ports(listen="[::]:0")


def test_a_host_of_another_machine_and_a_wrong_form_are_named() -> None:
    with pytest.raises(ServerError, match=r"listen = '192\.0\.2\.1:1': cannot be bound: "):
        check_ports(listen="192.0.2.1:1")
    with pytest.raises(InvalidArgumentError, match="listen = 'https://a:1': must be HOST:PORT without https://"):
        check_ports(listen="https://a:1")


@pytest.mark.parametrize(("command", "arguments"), COMMANDS, ids=["verifier", "drafter"])
@pytest.mark.parametrize("option", ["--listen", "--metrics-listen"])
def test_services_look_at_their_ports_first(
    busy: str, command: click.Command, arguments: tuple[str, ...], option: str
) -> None:
    text = failure(command, *arguments, option, busy)
    assert text.startswith(f"{option[2:].replace('-', '_')} = '{busy}': cannot be bound: the port is in use")


@pytest.mark.parametrize(("command", "arguments"), COMMANDS, ids=["verifier", "drafter"])
def test_services_look_at_their_certificates_first(
    tmp_path: Path, command: click.Command, arguments: tuple[str, ...]
) -> None:
    missing = str(tmp_path / "none.pem")
    files = ("--tls-cert", missing, "--tls-key", missing)
    assert failure(command, *arguments, *files) == f"{missing} cannot be read: No such file or directory"


def test_the_verifier_looks_at_its_tokens_first(tmp_path: Path) -> None:
    missing = str(tmp_path / "tokens")
    assert failure(verifier, "--token-file", missing) == f"{missing} cannot be read: No such file or directory"


@pytest.mark.parametrize("scheme", ["http", "https", "grpc"])
def test_the_verifier_names_drafters_with_a_scheme(scheme: str) -> None:
    text = failure(verifier, "--drafters", f"a:1,{scheme}://b:2", "--insecure")
    assert text.startswith(f"drafters = '{scheme}://b:2': must be HOST:PORT without {scheme}://, as in b:2")


def failure(command: click.Command, *arguments: str) -> str:
    """Return the error of a service that is started with these options and with models that do not exist."""
    options = ("--target", "./missing", "--listen", "127.0.0.1:0", "--device", "cpu")
    result = CliRunner().invoke(command, [*options, *arguments])
    assert isinstance(result.exception, DraftwireError)
    return str(result.exception)
