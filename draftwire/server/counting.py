"""Count messages where gRPC encodes and decodes them; anywhere else their size would need a second encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from draftwire.server.method_handlers import HandlerInterceptor, with_codec
from draftwire.transport.encoding import Encoded
from draftwire.transport.traffic import Direction

# Called with the size of a message before it is sent, or before its reader gets it; not for malformed bytes.
Count = Callable[[Direction, Message, int], None]


class CountingChannel:
    """A channel that counts the messages of a stub's methods. The methods also take encoded messages."""

    def __init__(self, channel: grpc.aio.Channel, count: Count) -> None:
        def counting(make: Callable[..., Any]) -> Callable[..., Any]:
            def make_counting(
                method: str,
                request_serializer: Callable[[Any], bytes],
                response_deserializer: Callable[[bytes], Any],
                **options: Any,
            ) -> Any:
                encode, decode = _encoding(request_serializer, count), _decoding(response_deserializer, count)
                return make(method, encode, decode, **options)

            return make_counting

        self.unary_unary = counting(channel.unary_unary)
        self.unary_stream = counting(channel.unary_stream)
        self.stream_unary = counting(channel.stream_unary)
        self.stream_stream = counting(channel.stream_stream)


class CountingInterceptor(HandlerInterceptor):
    """Counts the messages of one service's methods in the task that reads or writes them. The methods may send encoded
    messages."""

    def __init__(self, service_name: str, count: Count) -> None:
        self._prefix = f"/{service_name}/"
        self._count = count

    def replace(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        if not call.method.startswith(self._prefix):
            return handler
        decode = _decoding(handler.request_deserializer, self._count)
        return with_codec(handler, decode, _encoding(handler.response_serializer, self._count))


def _encoding(serialize: Callable[[Any], bytes], count: Count) -> Callable[[Any], bytes]:
    def encode(message: Any) -> bytes:
        encoded = message if isinstance(message, Encoded) else Encoded(message, serialize(message))
        count("sent", encoded.message, len(encoded.data))
        return encoded.data

    return encode


def _decoding(deserialize: Callable[[bytes], Any], count: Count) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        message = deserialize(data)
        count("received", message, len(data))
        return message

    return decode
