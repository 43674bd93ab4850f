"""Wrappers around the methods of a server, of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Any]
# Status, its text and trailing metadata.
Refusal = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


def rebuild_handler(
    handler: Any,
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], bytes],
    wrap: Callable[[Behaviour], Behaviour] = lambda behaviour: behaviour,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind with this decoder and encoder, whose method is `wrap` of the given method."""
    streams = handler.request_streaming, handler.response_streaming
    name = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    rebuilt: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{name}_rpc_method_handler")(
        wrap(getattr(handler, name)), decode, encode
    )
    return rebuilt


def refusing_handler(handler: Any, refusal: Refusal) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for the same method that reads no message and answers `refusal`."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(*refusal)

    kinds = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    kind: Any = kinds[bool(handler.response_streaming)]
    refusing: grpc.RpcMethodHandler[Any, Any] = kind(refuse, None, handler.response_serializer)
    return refusing
