"""Messages as they go over the wire, with what is large put inside as they are encoded: those bytes are copied once.

Protobuf copies a field as it is set, as its message becomes part of another one, and as that is encoded, and nothing
else of Python's runs meanwhile. But what is encoded behind a message for a field inside of it, headed by the fields
around that one, is merged into it where the message is decoded.
https://protobuf.dev/programming-guides/encoding/#last-one-wins
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import Message

from draftwire.v1 import draft_pb2 as pb

_LENGTH_DELIMITED = 2

# Numbers of the fields that lead from a message to one inside of it.
Path = tuple[int, ...]


class Encoded(NamedTuple):
    """A message that has been encoded. Methods whose messages are counted send it as they do a message."""

    message: Message  # without what was put inside
    data: bytes


def path_to(message: type[Message], *names: str) -> Path:
    """The path to a field of bytes, by the names of the fields that lead to it."""
    path = []
    descriptor: Any = message.DESCRIPTOR
    for name in names:
        field = descriptor.fields_by_name[name]
        path.append(field.number)
        descriptor = field.message_type
    return tuple(path)


def encode(message: Message, *inside: tuple[Path, memoryview | None]) -> Encoded:
    """Encodes a message, and inside of it bytes for the fields that the paths lead to; None leaves a field as it is."""
    encoded = message.SerializeToString()
    pieces: list[bytes | memoryview] = []
    for path, data in inside:
        if data is not None:
            pieces += [_head(path, data.nbytes), data]
    return Encoded(message, b"".join([encoded, *pieces]) if pieces else encoded)


def encode_step(step: pb.DraftStep, features: memoryview | None) -> Encoded:
    """Encodes the message of a step and the elements of its features, None where they are elsewhere."""
    return encode(pb.DraftRequest(step=step), (_FEATURES, features))


_FEATURES = path_to(pb.DraftRequest, "step", "features", "data")


def _head(path: Path, size: int) -> bytes:
    """What comes before so many bytes at the end of a path."""
    head = b""
    for number in reversed(path):
        head = _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(head) + size) + head
    return head


def _varint(number: int) -> bytes:
    septets = []
    while number > 0x7F:
        septets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*septets, number])
