"""Five hundred clients at once and a queue of 64: those without a place are told so, the others get their output."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire import AsyncClient, Client
from draftwire.client import Completion
from draftwire.errors import QueueFullError
from draftwire.processes import start_verifier
from draftwire.security import LOOPBACK, open_channel

pytestmark = pytest.mark.xdist_group("queue")

NUM_CLIENTS = 500
GREEDY = {"temperature": 0, "max_tokens": 48}


async def crowd(address: str, prompts: list[list[int]]) -> list[Completion | QueueFullError]:
    """A client with a connection of its own for each prompt, all at once; what each got, and any other error raised."""

    async def ask(prompt: list[int]) -> Completion | QueueFullError:
        async with AsyncClient(address) as client:
            try:
                return await client.complete(prompt, **GREEDY)
            except QueueFullError as error:
                return error

    return await asyncio.gather(*map(ask, prompts))


def test_clients_without_a_place_are_told_when_to_come_again_and_all_others_are_served(shelf, references, tmp_path):
    greedy = references("llama").continuations
    wanted = [greedy[number % len(greedy)] for number in range(NUM_CLIENTS)]
    options = ("--device", "cpu", "--max-num-seqs", "8", "--max-queue", "64")
    with (
        start_verifier(shelf.target("llama"), [], *options, log_path=tmp_path / "verifier.log") as verifier,
        Client(verifier.address) as client,
        open_channel(verifier.address, LOOPBACK, ()) as channel,
    ):
        outcomes = asyncio.run(crowd(verifier.address, [one.prompt for one in wanted]))
        refused = [one for one in outcomes if isinstance(one, QueueFullError)]
        served = [(one, want) for one, want in zip(outcomes, wanted, strict=True) if isinstance(one, Completion)]
        assert len(served) >= 72
        assert refused
        assert all(one.retry_after_s is not None and 0 < one.retry_after_s < 60 for one in refused)
        assert all("the queue is full: 64 requests are waiting" in str(one) for one in refused)
        assert [list(one.token_ids) for one, _ in served] == [want.tokens for _, want in served]
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        info = client.info()
        assert (info.requests_running, info.requests_waiting) == (0, 0)
        assert list(client.complete(greedy[0].prompt, **GREEDY).token_ids) == greedy[0].tokens
