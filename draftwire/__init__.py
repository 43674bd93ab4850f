"""Speculative decoding served by two gRPC services."""

from draftwire.client import AsyncClient, Chunk, Client, Completion, Statistics
from draftwire.contract.errors import DraftwireError
from draftwire.contract.version import VERSION as __version__  # noqa: N811

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "DraftwireError", "Statistics", "__version__"]
