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


def status_of(error: DraftwireError) -> Refusal:
    """Return status code, text and trailing metadata of an error; the default code is INTERNAL."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        metadata = retry_metadata(str(error), error.retry_after_s)
    return _STATUS_CODES.get(type(error), grpc.StatusCode.INTERNAL), str(error), metadata
