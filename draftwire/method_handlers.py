"""Methods of a server with something put around them, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Any]


def rebuild_handler(
    handler: Any,
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], bytes],
    wrap: Callable[[Behaviour], Behaviour] = lambda behaviour: behaviour,
) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler of the same kind of method that decodes and encodes so, and runs what `wrap` makes of the method."""
    streams = handler.request_streaming, handler.response_streaming
    name = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    rebuilt: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{name}_rpc_method_handler")(
        wrap(getattr(handler, name)), decode, encode
    )
    return rebuilt
