"""Bytes that are no message are refused by name; grpc's own answer is UNKNOWN, with a stack trace in the log."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from draftwire.errors import Described, InvalidArgumentError
from draftwire.method_handlers import Behaviour, rebuild_handler


@dataclass(frozen=True)
class _Undecodable:
    """Stands for the request of a method that takes one: grpc reads that before the method is called."""

    error: InvalidArgumentError


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where a request cannot be decoded, whichever service it is for."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = _decoding(handler.request_deserializer, is_stream=handler.request_streaming)
        return rebuild_handler(handler, decode, handler.response_serializer, _refusing)


def _decoding(deserialize: Callable[[bytes], Any], *, is_stream: bool) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            refusal = InvalidArgumentError("message", Described(f"{len(data)} bytes"), f"cannot be decoded: {error}")
        if is_stream:
            raise refusal  # in the method, where it reads
        return _Undecodable(refusal)

    return decode


def _refusing(behaviour: Behaviour) -> Behaviour:
    """The method, which is not called with what could not be decoded, nor has to handle it on a stream."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            _check(request)
            return await behaviour(request, context)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            _check(request)
            async for response in behaviour(request, context):
                yield response
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return stream if inspect.isasyncgenfunction(behaviour) else answer


def _check(request: Any) -> None:
    if isinstance(request, _Undecodable):
        raise request.error
