"""Addresses, and the channel options that both ends of a connection share."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from draftwire.contract.errors import InvalidArgumentError

# One step of a large batch carries its features in one message.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# Room for the prompt of a very long context; larger messages are refused unread.
MAX_REQUEST_BYTES = 16 * 1024 * 1024
# Seconds after which a verifier sends KeepAlive on an idle stream, and after which a drafter ends a stream that brought
# no whole message: gRPC does not show whether half a message has arrived.
KEEP_ALIVE_S, SILENCE_S = 5.0, 30.0
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose host has vanished is noticed within seconds, on both sides.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def receiving_at_most(num_bytes: int) -> list[tuple[str, int]]:
    """Return the options of a channel or server that receives messages of at most `num_bytes`."""
    return [*{**dict(CHANNEL_OPTIONS), "grpc.max_receive_message_length": num_bytes}.items()]


def parse_address(address: str, field: str) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`.

    Raises:
        InvalidArgumentError: If the address is not of that form.
    """
    scheme, is_url, rest = address.partition("://")
    if is_url:
        allowed = f"must be HOST:PORT without {scheme}://, as in {rest.partition('/')[0] or 'localhost:50051'}"
        raise InvalidArgumentError(field, address, f"{allowed}; TLS is turned on by options, not by the address")
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidArgumentError(field, address, "must be HOST:PORT with a port in [0, 65535]")
    try:
        host.encode("idna")  # as look-ups do
    except UnicodeError as error:
        raise InvalidArgumentError(field, address, f"must be HOST:PORT with a name or an address ({error})") from error
    return host, int(port)


def split_addresses(given: str | Sequence[str], field: str) -> tuple[str, ...]:
    """Return the addresses of `HOST:PORT,HOST:PORT` or of a list of `HOST:PORT`.

    Raises:
        InvalidArgumentError: If there is no address, or one is malformed or occurs twice.
    """
    entries = given.split(",") if isinstance(given, str) else list(given)
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise InvalidArgumentError(field, given, "must be HOST:PORT, or several of them")
    addresses = tuple(entry.strip() for entry in entries)
    for address in addresses:
        parse_address(address, field)
    if len(set(addresses)) < len(addresses):
        raise InvalidArgumentError(field, given, "must name each address once")
    return addresses


def is_loopback(address: str, field: str = "address") -> bool:
    """Return whether HOST:PORT is on the loopback interface; an error about the form names `field`."""
    return is_loopback_host(parse_address(address, field)[0])


def is_loopback_host(host: str) -> bool:
    """Return whether a host is on the loopback interface: a loopback address, or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_literal(address: str) -> bool:
    """Return whether the host of HOST:PORT is an IP address."""
    try:
        ipaddress.ip_address(parse_address(address, "address")[0].strip("[]"))
    except ValueError:
        return False
    return True
