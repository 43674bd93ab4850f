"""Clients of a verifier's Generation service, synchronous and asyncio."""

from draftwire.client.asynchronous import AsyncClient, AsyncStream
from draftwire.client.output import Chunk, Completion, Statistics, TokenLogprobs
from draftwire.client.request import ChatMessage, Options, Prompt, StructuredOutput
from draftwire.client.synchronous import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Chunk",
    "Client",
    "Completion",
    "Options",
    "Prompt",
    "Statistics",
    "Stream",
    "StructuredOutput",
    "TokenLogprobs",
]
