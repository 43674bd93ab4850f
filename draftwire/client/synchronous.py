"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import grpc
from google.protobuf.message import Message

from draftwire.client.balancing import Balancer
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
from draftwire.contract.addresses import split_addresses
from draftwire.contract.client_security import LOOPBACK, ClientSecurity
from draftwire.v1 import generate_pb2 as pb


class _Call(Protocol):
    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Stream(Iterator[Chunk]):
    """The chunks of one request. Leaving it (`with`), cancelling or dropping it ends it in the server too.

    `address` is that of the server which the request went to.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client:
    """Connections to one or several verifiers; may be shared by threads.

    Examples:
        >>> with Client("localhost:50051") as client:  # doctest: +SKIP
        ...     for chunk in client.generate("def fibonacci(n):", max_tokens=64, temperature=0):
        ...         print(chunk.text, end="")
    """

    def __init__(self, address: str | Sequence[str], security: ClientSecurity = LOOPBACK) -> None:
        """
        Args:
            address: HOST:PORT of the verifier. Several (a list, or one text with commas), or a name that resolves to
                several hosts, take requests in turn; those that cannot be reached or do not serve are left out
                meanwhile.
            security: TLS, certificates and token; the default is plain text, on loopback alone. Its files are read now.

        Raises:
            InvalidArgumentError: If an address is not of that form, or would be plain text outside of loopback.
            ServerError: If a file of `security` cannot be read.
        """
        addresses = split_addresses(address, "address")
        self.address = ",".join(addresses)
        self._security = security
        self._metadata = security.metadata()
        self._balancer = Balancer(addresses, security)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Send a request and return its stream of chunks. Of several servers it waits until one is connected.

        Args:
            prompt: Text, a list of token ids, or a list of {"role", "content"} messages for the target's chat template.
            options: Fields of SamplingParams and of GenerateRequest, and `timeout` in seconds; see `Options`.

        Raises:
            InvalidArgumentError: At once for what a client can see; from the stream for what only the server can.
            QueueFullError: From the stream, if the server takes no further request now.
            RequestError: From the stream, with the gRPC status.
        """
        request, timeout = build_request(prompt, options)
        server, time_left = self._balancer.pick(timeout)
        span = CallSpan(server.address)
        metadata = (*self._metadata, *span.metadata)
        call = server.stub.Generate(request, timeout=time_left, metadata=metadata)
        return Stream(call, server.address, self._security, timeout, span)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole output of `generate` at its end; raises InvalidArgumentError for several outputs."""
        check_one_output(options)
        return (self.complete_all(prompt, **options))[0]

    def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Return all `n` outputs of `generate` at their end."""
        with self.generate(prompt, **options) as stream:
            return Completion.all_from_chunks(list(stream), options.get("n") or 1)

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        timeout: float | None = 10.0,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the token ids that `generate` makes of a prompt; `timeout` in seconds."""
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
        """Return what a server serves and with which drafters; of several, the next in turn. `timeout` in seconds."""
        answer: pb.GetVerifierInfoResponse = self._ask("GetVerifierInfo", pb.GetVerifierInfoRequest(), timeout)
        return answer

    def _ask(self, method: str, request: Message, timeout: float | None) -> Any:
        """Return the one answer of a method of the next server in turn."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
