"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, Unpack

import grpc
from google.protobuf.message import Message

from draftwire.client.balancing import Balancer
from draftwire.client.base import ClientBase
from draftwire.client.call_span import CallSpan
from draftwire.client.output import Chunk, Completion, chunk_from_message
from draftwire.client.request import (
    ChatMessage,
    ChatOptions,
    Options,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
    check_one_output,
    to_error,
)
from draftwire.contract.client_security import LOOPBACK, ClientSecurity
from draftwire.v1 import generate_pb2 as pb


class _Call(Protocol):
    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Stream(Iterator[Chunk]):
    """The chunks of one request. Leaving `with`, `cancel` and dropping the stream end the request in the server.

    `address` is the server's.
    """

    def __init__(
        self, call: _Call, address: str, security: ClientSecurity, timeout: float | None, span: CallSpan
    ) -> None:
        self._call = call
        self._span = span
        self.address = address
        self._security = security
        self._timeout = timeout
        self._request_id = ""
        self._cancelled = False

    def __next__(self) -> Chunk:
        try:
            chunk = chunk_from_message(next(self._call), self._request_id)
        except StopIteration:
            self._span.end(self._request_id)
            raise
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            self._span.end(self._request_id, error.code().name)
            security = None if self._request_id else self._security
            raise to_error(error, self.address, self._timeout, security) from error
        self._request_id = chunk.request_id
        return chunk

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        self._cancelled = True
        self._call.cancel()
        self._span.end(self._request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client(ClientBase):
    """Connections to one or several verifiers; thread-safe.

    Examples:
        >>> with Client("localhost:50051") as client:  # doctest: +SKIP
        ...     for chunk in client.generate("def fibonacci(n):", max_tokens=64, temperature=0):
        ...         print(chunk.text, end="")
    """

    def __init__(self, address: str | Sequence[str], security: ClientSecurity = LOOPBACK) -> None:
        super().__init__(address, security)
        self._balancer = Balancer(self._addresses, security)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Send a request and return its stream of chunks. With several servers, wait until one is connected.

        Args:
            prompt: Text, a list of token ids, or a list of {"role", "content"} messages for the target's chat template.
            options: Fields of SamplingParams and of GenerateRequest, and `timeout` in seconds; see `Options`.

        Raises:
            InvalidArgumentError: For a wrong option; from the stream if only the server can check the option.
            QueueFullError: From the stream, if the server's queue is full.
            RequestError: From the stream, with the gRPC status.
        """
        request, timeout = build_request(prompt, options)
        server, time_left = self._balancer.pick(timeout)
        span = CallSpan(server.address)
        metadata = (*self._metadata, *span.metadata)
        call = server.stub.Generate(request, timeout=time_left, metadata=metadata)
        return Stream(call, server.address, self._security, timeout, span)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole output of `generate` and return it; raise InvalidArgumentError if `n` is not 1."""
        check_one_output(options)
        return self.complete_all(prompt, **options)[0]

    def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Wait for all `n` outputs of `generate` and return them."""
        with self.generate(prompt, **options) as stream:
            return Completion.all_from_chunks(list(stream), options.get("n") or 1)

    def tokenize(
        self, prompt: str | Sequence[ChatMessage], timeout: float | None = 10.0, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Return the token ids of a prompt, as `generate` would tokenize it; `timeout` in seconds."""
        request = build_tokenize_request(prompt, options)
        answer = self._ask("Tokenize", request, timeout)
        return list(answer.token_ids)

    def detokenize(
        self, token_ids: Sequence[int], timeout: float | None = 10.0, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids; `timeout` in seconds."""
        request = build_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        answer = self._ask("Detokenize", request, timeout)
        return str(answer.text)

    def info(self, timeout: float | None = 10.0) -> pb.GetVerifierInfoResponse:
        """Return the model, limits and drafters of a server, of several the next in turn; `timeout` in seconds."""
        answer: pb.GetVerifierInfoResponse = self._ask("GetVerifierInfo", pb.GetVerifierInfoRequest(), timeout)
        return answer

    def _ask(self, method: str, request: Message, timeout: float | None) -> Any:
        """Call a unary method of the next server in turn, and return its answer."""
        server, time_left = self._balancer.pick(timeout)
        try:
            return getattr(server.stub, method)(request, timeout=time_left, metadata=self._metadata)
        except grpc.RpcError as error:
            raise to_error(error, server.address, timeout, self._security) from error

    def close(self) -> None:
        """Close the connections; requests that still run are cancelled."""
        self._balancer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
