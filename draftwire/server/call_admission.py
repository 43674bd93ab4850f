"""Serve every method as one with a stream of requests, so that the server limits how its message is read.

grpc.aio reads the message of a unary call before it calls the method, and limits neither time, calls nor bytes. A
method with a stream of requests is called after the metadata and reads its messages itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from draftwire.contract.errors import Described, InvalidArgumentError, QueueFullError
from draftwire.contract.retry import retry_metadata
from draftwire.server.message_reading import MessageReader
from draftwire.server.method_handlers import Behaviour, HandlerInterceptor, Refusal, with_codec

# Seconds within which gRPC reports a cancelled call, which otherwise looks like a call without a message.
CANCELLATION_S = 0.1


class AdmissionInterceptor(HandlerInterceptor):
    """Reads the messages of the named services' methods with `reader`, and those of other services with `others`.

    Streaming methods of the named services read their messages themselves. A message that cannot be decoded gets
    INVALID_ARGUMENT.
    """

    def __init__(self, service_names: Sequence[str], reader: MessageReader, others: MessageReader) -> None:
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self._reader = reader
        self._others = others

    def replace(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        is_own = call.method.startswith(self._prefixes)
        decode = _decoding(handler.request_deserializer)
        if is_own and handler.request_streaming:
            return with_codec(handler, decode, handler.response_serializer)
        return _reading_handler(handler, decode, self._reader if is_own else self._others)


def _decoding(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            text = f"cannot be decoded: {error}"
        raise InvalidArgumentError("message", Described(f"{len(data)} bytes"), text)

    return decode


def _reading_handler(handler: Any, decode: Callable[[bytes], Any], reader: MessageReader) -> Any:
    """Return a handler that takes a stream, and calls the method of `handler` with the message that `reader` reads."""
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _reading_all(handler.stream_stream, reader), decode, handler.response_serializer
        )
    if handler.response_streaming:
        behaviour = handler.unary_stream
        reading = _reading_one if inspect.iscoroutinefunction(behaviour) else _reading_one_for_many
        return grpc.stream_stream_rpc_method_handler(reading(behaviour, reader), decode, handler.response_serializer)
    return grpc.stream_unary_rpc_method_handler(
        _reading_one(handler.unary_unary, reader), decode, handler.response_serializer
    )


def _reading_one(behaviour: Behaviour, reader: MessageReader) -> Behaviour:
    async def serve(_requests: Any, context: Any) -> Any:
        request, refusal = await _read_one(reader, context)
        if refusal is not None:
            await context.abort(*refusal)
        return await behaviour(request, context)

    return serve


def _reading_one_for_many(behaviour: Behaviour, reader: MessageReader) -> Behaviour:
    async def serve(_requests: Any, context: Any) -> AsyncIterator[Any]:
        request, refusal = await _read_one(reader, context)
        if refusal is not None:
            await context.abort(*refusal)
        async for response in behaviour(request, context):
            yield response

    return serve


def _reading_all(behaviour: Behaviour, reader: MessageReader) -> Behaviour:
    async def serve(_requests: Any, context: Any) -> AsyncIterator[Any]:
        refusals: list[Refusal] = []

        async def read_all() -> AsyncIterator[Any]:
            while True:
                request, refusal = await _read(reader, context)
                if refusal is not None:
                    refusals.append(refusal)
                if refusal is not None or request is grpc.aio.EOF:
                    return
                yield request

        async for response in behaviour(read_all(), context):
            yield response
        if refusals:
            await context.abort(*refusals[0])

    return serve


async def _read_one(reader: MessageReader, context: Any) -> tuple[Any, Refusal | None]:
    request, refusal = await _read(reader, context)
    if request is grpc.aio.EOF:
        await asyncio.sleep(CANCELLATION_S)
        error = InvalidArgumentError("message", None, "this method takes one message")
        return None, (grpc.StatusCode.INVALID_ARGUMENT, str(error), ())
    return request, refusal


async def _read(reader: MessageReader, context: Any) -> tuple[Any, Refusal | None]:
    """Return a message or a refusal. Raise nothing, because gRPC keeps an exception and all objects in its frames."""
    try:
        return await reader.read(context), None
    except InvalidArgumentError as error:
        return None, (grpc.StatusCode.INVALID_ARGUMENT, str(error), ())
    except QueueFullError as error:
        seconds = error.retry_after_s
        metadata = () if seconds is None else retry_metadata(str(error), seconds)
        return None, (grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), metadata)
    except TimeoutError as error:
        return None, (grpc.StatusCode.DEADLINE_EXCEEDED, str(error), ())
