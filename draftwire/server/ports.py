"""Check a service's ports before it loads anything."""

from __future__ import annotations

import errno
import socket

from draftwire.contract.addresses import parse_address
from draftwire.contract.errors import ServerError


def check_ports(**addresses: str | None) -> None:
    """Check that each address can be bound now; the keywords are the options' names, None is unset.

    Raises:
        InvalidArgumentError: If an address is not HOST:PORT.
        ServerError: If a port is in use, or a host is not this machine.
    """
    for field, address in addresses.items():
        if address is None:
            continue
        host, port = parse_address(address, field)
        failures = _failures(host.strip("[]"), port)
        if failures is not None:
            is_used = any(error.errno == errno.EADDRINUSE for error in failures)
            reason = "the port is in use" if is_used else str(failures[0].strerror or failures[0])
            raise ServerError(f"{field} = {address!r}: cannot be bound: {reason}")


def _failures(host: str, port: int) -> list[OSError] | None:
    """Return why no address of the host can be bound; None when one can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return [error]
    failures = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC binds
                tried.bind(address)
        except OSError as error:
            failures.append(error)
        else:
            return None
    return failures
