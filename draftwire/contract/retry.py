"""When a refused client should try again: google.rpc.RetryInfo in the trailing metadata of RESOURCE_EXHAUSTED.

The key `grpc-status-details-bin` with a google.rpc.Status is gRPC's standard; clients in any language can read it.
grpcio-status would save two lines here, and is one more package whose version must match grpcio's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"


def retry_metadata(message: str, seconds: float) -> tuple[tuple[str, bytes], ...]:
    """Return trailing metadata of RESOURCE_EXHAUSTED that asks the client to wait for `seconds`."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(int(1e9 * seconds))
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=message)
    status.details.add().Pack(info)
    return ((DETAILS_KEY, status.SerializeToString()),)


def retry_after_s(metadata: Iterable[Any]) -> float | None:
    """Return the seconds that trailing metadata, (key, value) each, asks to wait; None when it does not say."""
    for key, value in metadata:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
            info = error_details_pb2.RetryInfo()
            if any(detail.Unpack(info) for detail in status.details):
                return info.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:  # the peer is not a verifier
            continue
    return None
