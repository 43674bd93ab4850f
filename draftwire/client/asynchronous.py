"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from draftwire.client.balancing import AsyncBalancer, Server
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

if TYPE_CHECKING:
    from draftwire.v1.generate_pb2_grpc import GenerationAsyncStub


Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request. Leaving `async with`, `cancel` and dropping the stream end the request in the server.

    `address` is the server's; it may be empty before the first chunk.
    """

    def __init__(
        self,
        opening: asyncio.Task[tuple[Call, str]],
        security: ClientSecurity,
        timeout: float | None,
        span: CallSpan,
    ) -> None:
        self._opening = opening
        self._span = span
        self._messages: AsyncIterator[pb.GenerateResponse] | None = None
        self.address = ""
        self._security = security
        self._timeout = timeout
        self._request_id = ""
        self._cancelled = False

    async def __anext__(self) -> Chunk:
        if self._cancelled:
            raise StopAsyncIteration
        try:
            if self._messages is None:
                call, self.address = await asyncio.shield(self._opening)
                self._messages = aiter(call)
            chunk = chunk_from_message(await anext(self._messages), self._request_id)
        except StopAsyncIteration:
            self._span.end(self._request_id)
            raise
        except grpc.RpcError as error:
            self._span.end(self._request_id, error.code().name)
            security = None if self._request_id else self._security
            raise await asyncio.to_thread(to_error, error, self.address, self._timeout, security) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):  # the call was cancelled, not the reader
                raise StopAsyncIteration from None
            raise
        self._request_id = chunk.request_id
        return chunk

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        self._cancelled = True
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result()[0].cancel()
        self._span.end(self._request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class AsyncClient(ClientBase):
    """Connections to one or several verifiers, for one event loop.

    Examples:
        >>> async with AsyncClient("localhost:50051") as client:  # doctest: +SKIP
        ...     async for chunk in client.generate("def fibonacci(n):", max_tokens=64, temperature=0):
        ...         print(chunk.text, end="")
    """

    def __init__(self, address: str | Sequence[str], security: ClientSecurity = LOOPBACK) -> None:
        super().__init__(address, security)
        for one in self._addresses:
            security.credentials(one)
        self._balancer: AsyncBalancer | None = None

    async def _pick(self, timeout: float | None) -> tuple[Server[GenerationAsyncStub], float | None]:
        # A channel belongs to the event loop that runs at its creation. The client may be created before that loop.
        if self._balancer is None:
            self._balancer = AsyncBalancer(self._addresses, self._security)
        return await self._balancer.pick(timeout)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Send a request and return its stream of chunks. Call in a running event loop.

        Args:
            prompt: Text, a list of token ids, or a list of {"role", "content"} messages for the target's chat template.
            options: Fields of SamplingParams and of GenerateRequest, and `timeout` in seconds; see `Options`.

        Raises:
            InvalidArgumentError: For a wrong option; from the stream if only the server can check the option.
            QueueFullError: From the stream, if the server's queue is full.
            RequestError: From the stream, with the gRPC status.
        """
        request, timeout = build_request(prompt, options)
        span = CallSpan(self.address)
        metadata = (*self._metadata, *span.metadata)
        opening = asyncio.get_running_loop().create_task(self._open(request, timeout, metadata))
        return AsyncStream(opening, self._security, timeout, span)

    async def _open(
        self, request: pb.GenerateRequest, timeout: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> tuple[Call, str]:
        server, time_left = await self._pick(timeout)
        return server.stub.Generate(request, timeout=time_left, metadata=metadata), server.address

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole output of `generate` and return it; raise InvalidArgumentError if `n` is not 1."""
        check_one_output(options)
        return (await self.complete_all(prompt, **options))[0]

    async def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Wait for all `n` outputs of `generate` and return them."""
        async with self.generate(prompt, **options) as stream:
            return Completion.all_from_chunks([chunk async for chunk in stream], options.get("n") or 1)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], timeout: float | None = 10.0, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Return the token ids of a prompt, as `generate` would tokenize it; `timeout` in seconds."""
        request = build_tokenize_request(prompt, options)
        answer = await self._ask("Tokenize", request, timeout)
        return list(answer.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], timeout: float | None = 10.0, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids; `timeout` in seconds."""
        request = build_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        answer = await self._ask("Detokenize", request, timeout)
        return str(answer.text)

    async def info(self, timeout: float | None = 10.0) -> pb.GetVerifierInfoResponse:
        """Return the model, limits and drafters of a server, of several the next in turn; `timeout` in seconds."""
        answer: pb.GetVerifierInfoResponse = await self._ask("GetVerifierInfo", pb.GetVerifierInfoRequest(), timeout)
        return answer

    async def _ask(self, method: str, request: Message, timeout: float | None) -> Any:
        """Call a unary method of the next server in turn, and return its answer."""
        server, time_left = await self._pick(timeout)
        try:
            return await getattr(server.stub, method)(request, timeout=time_left, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await asyncio.to_thread(to_error, error, server.address, timeout, self._security) from error

    async def close(self) -> None:
        """Close the connections; requests that still run are cancelled."""
        if self._balancer is not None:
            await self._balancer.close()
            self._balancer = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
