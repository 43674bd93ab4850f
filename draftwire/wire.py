"""What both ends of a connection agree on: the form of addresses and the size of messages."""

from __future__ import annotations

from draftwire.errors import InvalidArgumentError

# One step of a large batch carries its features in one message.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def parse_address(address: str, field: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT`.

    Raises
    ------
    InvalidArgumentError
        Names `field` when the address is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidArgumentError(field, address, "must be HOST:PORT with a port in [0, 65535]")
    return host, int(port)
