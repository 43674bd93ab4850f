"""Messages as sent on the wire, with large fields inserted at encoding, so that their bytes are copied once.

Protobuf copies a field when it is set, when its message becomes part of another message, and when that message is
encoded, and holds the GIL. But bytes that follow an encoded message, with the headers of the enclosing fields, are
merged into the field by the decoder. https://protobuf.dev/programming-guides/encoding/#last-one-wins
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import Message

from draftwire.v1 import draft_pb2 as pb

_LENGTH_DELIMITED = 2

# Numbers of the fields that lead from a message to a nested field.
Path = tuple[int, ...]


class Encoded(NamedTuple):
    """An encoded message, which methods of a counting stub or service send like a message."""

    message: Message  # without the inserted bytes
    data: bytes


def path_to(message: type[Message], *names: str) -> Path:
    """Return the path to a field of bytes, by the names of the fields that lead to it."""
    path = []
    descriptor: Any = message.DESCRIPTOR
    for name in names:
        field = descriptor.fields_by_name[name]
        path.append(field.number)
        descriptor = field.message_type
    return tuple(path)


def encode(message: Message, *inside: tuple[Path, memoryview | None]) -> Encoded:
    """Encode a message with bytes inserted for the fields at these paths; None leaves a field unchanged."""
    encoded = message.SerializeToString()
    pieces: list[bytes | memoryview] = []
    for path, data in inside:
        if data is not None:
            pieces += [_head(path, data.nbytes), data]
    return Encoded(message, b"".join([encoded, *pieces]) if pieces else encoded)


def encode_step(step: pb.DraftStep, features: memoryview | None) -> Encoded:
    """Encode a step's message with the elements of its features; None if the features are in shared memory."""
    return encode(pb.DraftRequest(step=step), (_FEATURES, features))


_FEATURES = path_to(pb.DraftRequest, "step", "features", "data")


def _head(path: Path, size: int) -> bytes:
    """Return the headers that come before `size` bytes of the field at the end of a path."""
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
