"""The gRPC status of each error that reaches a client."""

from __future__ import annotations

import grpc

from draftwire.contract.errors import (
    DraftwireError,
    InvalidArgumentError,
    QueueFullError,
    StalledClientError,
    UnavailableError,
)
from draftwire.contract.retry import retry_metadata
from draftwire.server.method_handlers import Refusal

_STATUS_CODES: dict[type[DraftwireError], grpc.StatusCode] = {
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    StalledClientError: grpc.StatusCode.ABORTED,
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
}

# Maximum bytes of a text. gRPC sends up to three bytes for each, in metadata of at most 8 KiB.
MAX_TEXT_BYTES = 2048


def status_of(error: DraftwireError) -> Refusal:
    """Return status code, text and trailing metadata of an error; the default code is INTERNAL.

    The text is UTF-8 of at most `MAX_TEXT_BYTES`: libraries' errors quote the client's text, which may be long and may
    have halves of surrogate pairs, escaped in JSON.
    """
    text = str(error).encode(errors="backslashreplace")[:MAX_TEXT_BYTES].decode(errors="ignore")
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        metadata = retry_metadata(text, error.retry_after_s)
    return _STATUS_CODES.get(type(error), grpc.StatusCode.INTERNAL), text, metadata
