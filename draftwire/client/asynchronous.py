"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from draftwire.client.call_span import CallSpan
from draftwire.client.output import Chunk, Completion, chunk_from_message
from draftwire.client.request import (
    CLIENT_CHANNEL_OPTIONS,
    ChatMessage,
    ChatOptions,
    Options,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
    to_error,
)
from draftwire.contract.addresses import parse_address
from draftwire.server.security import LOOPBACK, ClientSecurity, open_async_channel
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from draftwire.v1.generate_pb2_grpc import GenerationAsyncStub


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request. Leaving it (`async with`), cancelling or dropping it ends it in the server too."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
        address: str,
        security: ClientSecurity,
        timeout: float | None,
        span: CallSpan,
    ) -> None:
        self._call = call
        self._span = span
        self._messages = aiter(call)
        self._address = address
        self._security = security
        self._timeout = timeout
        self._request_id = ""
        self._cancelled = False

    async def __anext__(self) -> Chunk:
        if self._cancelled:
            raise StopAsyncIteration
        try:
            chunk = chunk_from_message(await anext(self._messages), self._request_id)
        except StopAsyncIteration:
            self._span.end(self._request_id)
            raise
        except grpc.RpcError as error:
            self._span.end(self._request_id, error.code().name)
            security = None if self._request_id else self._security
            raise await asyncio.to_thread(to_error, error, self._address, self._timeout, security) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):  # the call was cancelled, not the reader
                raise StopAsyncIteration from None
            raise
        self._request_id = chunk.request_id
        return chunk

    def cancel(self) -> None:
        """Ends the request; harmless once it has ended."""
        self._cancelled = True
        self._call.cancel()
        self._span.end(self._request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class AsyncClient:
    """A connection to one verifier, for one event loop.

    Examples
    --------
    >>> async with AsyncClient("localhost:50051") as client:  # doctest: +SKIP
    ...     async for chunk in client.generate("def fibonacci(n):", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="")
    """

    def __init__(self, address: str, security: ClientSecurity = LOOPBACK) -> None:
        """
        Parameters
        ----------
        address
            HOST:PORT of the verifier. The connection is made by the first call.
        security
            TLS, certificates and token; the default is plain text, on loopback alone.

        Raises
        ------
        InvalidArgumentError
            When the address is not of that form, or would be plain text outside of loopback.
        ServerError
            When a file of `security` cannot be read.
        """
        parse_address(address, "address")
        security.credentials(address)
        self.address = address
        self._security = security
        self._metadata = security.metadata()
        self._channel: grpc.aio.Channel | None = None

    def _stub(self) -> GenerationAsyncStub:
        # A channel belongs to the loop that runs when it is made, which need not run yet when the client is made.
        if self._channel is None:
            self._channel = open_async_channel(self.address, self._security, CLIENT_CHANNEL_OPTIONS)
        return GenerationStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Sends a request and returns its stream of chunks. Called with a running event loop.

        Parameters
        ----------
        prompt
            Text, a list of token ids, or a list of {"role", "content"} messages for the target's chat template.
        options
            Fields of SamplingParams, `num_speculative_tokens`, `request_id` and `timeout` in seconds; see `Options`.

        Raises
        ------
        InvalidArgumentError
            At once for what a client can see; from the stream for what only the server can.
        QueueFullError
            From the stream, when the server takes no further request now.
        RequestError
            From the stream, with the gRPC status.
        """
        request, timeout = build_request(prompt, options)
        span = CallSpan(self.address)
        call = self._stub().Generate(request, timeout=timeout, metadata=(*self._metadata, *span.metadata))
        return AsyncStream(call, self.address, self._security, timeout, span)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As `generate`, but returns the whole output at its end."""
        async with self.generate(prompt, **options) as stream:
            return Completion.from_chunks([chunk async for chunk in stream])

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        timeout: float | None = 10.0,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the token ids that `generate` makes of a prompt; `timeout` in seconds."""
        request = build_tokenize_request(prompt, options)
        try:
            answer = await self._stub().Tokenize(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await asyncio.to_thread(to_error, error, self.address, timeout, self._security) from error
        return list(answer.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], timeout: float | None = 10.0, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids; `timeout` in seconds."""
        request = build_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        try:
            answer = await self._stub().Detokenize(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await asyncio.to_thread(to_error, error, self.address, timeout, self._security) from error
        return str(answer.text)

    async def info(self, timeout: float | None = 10.0) -> pb.GetVerifierInfoResponse:
        """What the server serves and with which drafters; `timeout` in seconds."""
        try:
            return await self._stub().GetVerifierInfo(
                pb.GetVerifierInfoRequest(), timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise await asyncio.to_thread(to_error, error, self.address, timeout, self._security) from error

    async def close(self) -> None:
        """Closes the connection; requests that still run are cancelled."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
