"""Replacement of the methods of a server, of any kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Any]
# Status, its text and trailing metadata.
Refusal = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


class HandlerInterceptor(grpc.aio.ServerInterceptor, ABC):
    """An interceptor that replaces the handlers of methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self.replace(handler, handler_call_details)

    @abstractmethod
    def replace(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        """Return the handler for a call: `handler`, or another in its place."""


def with_codec(handler: Any, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Any:
    """Return a handler for the same method with this decoder and encoder."""
    streams = handler.request_streaming, handler.response_streaming
    name = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    return getattr(grpc, f"{name}_rpc_method_handler")(getattr(handler, name), decode, encode)


def refusing_handler(handler: Any, refusal: Refusal) -> Any:
    """Return a handler for the same method that reads no message and answers `refusal`."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(*refusal)

    kinds = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    kind: Any = kinds[bool(handler.response_streaming)]
    return kind(refuse, None, handler.response_serializer)
