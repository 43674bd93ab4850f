"""Bytes that are nearly valid: mutated messages, and HTTP/2 frames and gRPC prefixes with wrong values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
# Valid requests to the metrics port.
SCRAPES = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=1.0.0,text/plain;q=0.5\r\n\r\n",
    b"GET /metrics?name[]=draftwire_num_requests_running HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd",
    b"OPTIONS /favicon.ico HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
)
OTHER_PROTOCOLS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 99)
# Boundary values of lengths, ids and counters.
EDGES = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def varint(value: int) -> bytes:
    """Return a number as a protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def mutated(rng: Random, data: bytes) -> bytes:
    """Return `data` with changed bits, bytes and numbers, and with pieces cut out, repeated or inserted."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        piece = rng.randrange(1, 17)
        change = rng.randrange(7)
        if change == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(out):
            out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif change == 2:
            del out[at : at + piece]
        elif change == 3:
            out[at:at] = out[at : at + piece] * rng.choice((1, 2, 50))
        elif change == 4:
            out[at:at] = rng.randbytes(piece)
        elif change == 5:
            out[at : at + piece] = varint(rng.choice(EDGES))
        else:
            del out[at:]
    return bytes(out)


def foreign_fields(rng: Random) -> bytes:
    """Return protobuf fields of random numbers and wire types, including groups and over-long varints."""
    out = bytearray()
    for _ in range(rng.randrange(1, 6)):
        number, kind = rng.choice((1, 2, 3, 4, 5, 15, 16, 2047, 19000, 2**29 - 1)), rng.randrange(8)
        out += varint(number << 3 | kind)
        if kind == 0:
            out += rng.choice((varint(rng.choice(EDGES)), b"\xff" * rng.randrange(1, 12)))
        elif kind == 2:
            content = rng.randbytes(rng.randrange(40))
            out += varint(rng.choice((len(content), rng.choice(EDGES)))) + content
        else:
            out += rng.randbytes(rng.randrange(9))
    return bytes(out)


def nested(rng: Random) -> bytes:
    """Return deeply nested messages."""
    content = b""
    for _ in range(rng.choice((5, 99, 101, 400))):
        content = varint(rng.choice((1, 3, 4)) << 3 | 2) + varint(len(content)) + content
    return content


def hostile_message(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Return bytes in place of a message, mostly a mutation of one of `seeds`."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 7, 64, 1000)))
    if kind == 1:
        return foreign_fields(rng)
    if kind == 2:
        return nested(rng)
    if kind == 3:
        return rng.choice(seeds) + foreign_fields(rng)
    if kind == 4:
        first, second = rng.choice(seeds), rng.choice(seeds)
        return first[: rng.randrange(len(first) + 1)] + second[rng.randrange(len(second) + 1) :]
    return mutated(rng, rng.choice(seeds))


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Return an HTTP/2 frame; `length` replaces the payload's length."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size & 0xFFFFFF)[1:] + struct.pack(">BBI", kind, flags, stream & 0xFFFFFFFF) + payload


def header_block(path: str, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return the headers of a gRPC call as HPACK literals without indexing."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "fuzz"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    ]
    out = bytearray()
    for name, value in fields:
        for text in (name, value):
            if text is name:
                out.append(0)
            encoded = text.encode()
            assert len(encoded) < 127
            out += bytes([len(encoded)]) + encoded
    return bytes(out)


def prefixed(rng: Random, message: bytes) -> bytes:
    """Return a message with gRPC's prefix, whose compression flag and length may be wrong."""
    compressed = rng.choice((0, 0, 0, 0, 1, 2, 255))
    length = rng.choice((len(message), len(message), rng.choice(EDGES), max(0, len(message) - 1), len(message) + 1))
    return struct.pack(">BI", compressed, length & 0xFFFFFFFF) + message


def hostile_connection(rng: Random, path: str, message: bytes) -> bytes:
    """Return all bytes that a client sends on a connection: noise, another protocol, or possibly invalid HTTP/2."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice((1, 9, 24, 100, 5000)))
    if kind == 1:
        return rng.choice(OTHER_PROTOCOLS)
    if kind == 2:
        return PREFACE + rng.randbytes(rng.randrange(1, 400))
    call = [
        frame(SETTINGS, 0, 0, b""),
        frame(HEADERS, END_HEADERS, 1, header_block(path)),
        frame(DATA, END_STREAM, 1, prefixed(rng, message)),
    ]
    if kind == 3:
        return mutated(rng, PREFACE + b"".join(call))
    if kind == 4:
        call[rng.randrange(3)] = _hostile_frame(rng)
    elif kind == 5:
        call.insert(rng.randrange(4), _hostile_frame(rng) * rng.choice((1, 1, 20)))
    elif kind == 6:
        call[1] = frame(HEADERS, END_HEADERS, 1, mutated(rng, header_block(path)))
    return PREFACE + b"".join(call)


def hostile_scrape(rng: Random) -> bytes:
    """Return all bytes that a client sends to the metrics port: noise, another protocol, or possibly invalid HTTP."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice((1, 9, 100, 5000)))
    if kind == 1:
        return rng.choice((PREFACE + frame(SETTINGS, 0, 0, b""), *OTHER_PROTOCOLS))
    if kind == 2:
        return b"GET /metrics?name[]=" + b"a" * rng.choice((1000, 70_000)) + b" HTTP/1.1\r\n\r\n"
    if kind == 3:
        headers = b"".join(b"X-%d: %d\r\n" % (number, number) for number in range(rng.choice((9, 300))))
        return b"GET /metrics HTTP/1.1\r\n" + headers + b"\r\n"
    return mutated(rng, rng.choice(SCRAPES))


def _hostile_frame(rng: Random) -> bytes:
    kind = rng.choice((*range(10), rng.randrange(256)))
    stream = rng.choice((0, 0, 1, 1, 2, 3, 2**31 - 1, 2**32 - 1))
    settings = struct.pack(">HI", rng.choice((1, 2, 3, 4, 5, 6, 77)), rng.choice(EDGES) & 0xFFFFFFFF)
    payload = rng.choice((b"", rng.randbytes(rng.choice((1, 4, 5, 8, 40))), settings * rng.choice((1, 100))))
    length = rng.choice((None, None, None, len(payload) + 1, 0xFFFFFF, 0))
    return frame(kind, rng.choice((0, 1, 4, 5, 8, 32, 255)), stream, payload, length)
