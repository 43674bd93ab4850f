"""A relay between a verifier and a drafter that changes or delays the drafter's answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import grpc
import torch
from exact_services import Loop

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc

Alter = Callable[[pb.Drafts], Awaitable[None]]


class DraftRelay(draft_pb2_grpc.DraftingServicer):
    """Forward all calls to a drafter. `alter` changes or delays its answers; any thread may set it."""

    def __init__(self, upstream: str) -> None:
        self.alter: Alter | None = None
        self._loop = Loop()
        self._loop.run(self._start(upstream))

    async def _start(self, upstream: str) -> None:
        self._channel = grpc.aio.insecure_channel(upstream, options=CHANNEL_OPTIONS)
        self._stub = draft_pb2_grpc.DraftingStub(self._channel)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        draft_pb2_grpc.add_DraftingServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._stop())
        self._loop.close()

    async def GetDrafterInfo(  # noqa: N802
        self, request: pb.GetDrafterInfoRequest, context: Any
    ) -> pb.GetDrafterInfoResponse:
        try:
            return await self._stub.GetDrafterInfo(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
            raise

    async def GetFeatureFusion(  # noqa: N802
        self,
        request: pb.GetFeatureFusionRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.FeatureFusionChunk]:
        async for chunk in self._stub.GetFeatureFusion(request):
            yield chunk

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        call = self._stub.Draft(request_iterator)
        try:
            async for response in call:
                if self.alter is not None and response.WhichOneof("message") == "drafts":
                    await self.alter(response.drafts)
                yield response
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            call.cancel()


def hold_up(share: float) -> Alter:
    """Return an `alter` that delays a share of the answers by 1 s, the same in every run. Later answers wait too."""
    draw = random.Random(1)

    async def alter(_drafts: pb.Drafts) -> None:
        if draw.random() < share:
            await asyncio.sleep(1.0)

    return alter


def corrupt_tokens(vocab_size: int) -> Alter:
    """Return an `alter` that replaces the tokens of half of the answers by other tokens of the vocabulary."""

    async def alter(drafts: pb.Drafts) -> None:
        count = sum(drafts.num_drafts)
        if count and random.random() < 0.5:
            tokens = decode_tensor(drafts.tokens, "tokens", torch.int32, (count,))
            drafts.tokens.CopyFrom(encode_tensor((tokens + torch.randint_like(tokens, 1, vocab_size)) % vocab_size))

    return alter


async def corrupt_logits(drafts: pb.Drafts) -> None:
    """Shift the logits of half of the answers by one token id."""
    if drafts.HasField("logits") and random.random() < 0.5:
        shape = tuple(drafts.logits.shape)
        logits = decode_tensor(drafts.logits, "logits", torch.float32, shape)
        drafts.logits.CopyFrom(encode_tensor(logits.roll(1, dims=1).contiguous()))
