"""Speculative decoding served by two gRPC services."""

from draftwire.client import AsyncClient, Chunk, Client, Completion, Statistics
from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import (
    DraftwireError,
    InvalidArgumentError,
    QueueFullError,
    RequestError,
    ServerError,
)
from draftwire.contract.version import VERSION as __version__  # noqa: N811

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientSecurity",
    "Completion",
    "DraftwireError",
    "InvalidArgumentError",
    "QueueFullError",
    "RequestError",
    "ServerError",
    "Statistics",
    "__version__",
]
