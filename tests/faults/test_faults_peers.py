"""Clients die, do not read or arrive in a crowd, or a verifier is killed: other clients are not affected."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from addresses import free_address
from drafters import Drafter
from load import PATIENCE_S, SAMPLED_AT_ONCE, FaultRecord
from services import Continuation
from stage import Stage
from streaming_client import kill_client_in_mid_stream
from waiting import wait_for

from draftwire import AsyncClient, Client
from draftwire.client import Completion, balancing
from draftwire.client.request import CLIENT_CHANNEL_OPTIONS
from draftwire.contract.errors import QueueFullError
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2, generate_pb2_grpc
from draftwire_bench.processes import ServiceProcess

Matrix = Callable[[FaultRecord], None]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_STREAMS = 16

NUM_UNREAD_TOKENS = 120
# Rounds of the load. Its greedy requests have 40 tokens, so the unread requests could be computed twice meanwhile.
UNREAD_ROUNDS = 6
# A flow-control window that a few messages fill and that does not grow.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
# Maximum growth of the verifier by unread output: 16 KiB for each token's message.
MOST_UNREAD_BYTES = NUM_STREAMS * NUM_UNREAD_TOKENS * 16 * 1024

NUM_CLIENTS = 500
MAX_QUEUE = 64
MAX_NUM_SEQS = 8


def test_a_client_with_many_streams_is_killed(stage: Stage, matrix: Matrix) -> None:
    drafter, metrics = stage.drafter(), free_address()
    left = stage.verifier([drafter.address], "--metrics-listen", metrics)
    with (
        stage.load_on(left, stage.verifier([drafter.address])) as load,
        load.fault(f"client killed (SIGKILL) in the middle of {NUM_STREAMS} streams", during_above=0.8) as record,
    ):
        kill_client_in_mid_stream(left.address, NUM_STREAMS)
        load.wait_for(lambda: _num_cancelled(metrics) == NUM_STREAMS, "its requests are cancelled")
    matrix(record)


def _num_cancelled(metrics: str) -> int:
    with urlopen(f"http://{metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = 'draftwire_request_success_total{finished_reason="abort",'
    return next(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def test_clients_do_not_read_and_get_everything_when_they_do(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter()
    unread, prompt = stage.verifier([drafter.address]), [1, 2, 3]
    wanted, _ = stage.reference.greedy(prompt, NUM_UNREAD_TOKENS)
    params = config_pb2.SamplingParams(temperature=0, max_tokens=NUM_UNREAD_TOKENS, logprobs=8)
    request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling_params=params)
    with (
        stage.load_on(unread, stage.verifier([drafter.address])) as load,
        grpc.insecure_channel(unread.address, SMALL_WINDOW) as channel,
        load.fault(f"{NUM_STREAMS} clients do not read for {UNREAD_ROUNDS} rounds", during_above=0.8) as record,
    ):
        before, began = _resident_bytes(unread.pid), time.monotonic()
        calls = [
            generate_pb2_grpc.GenerationStub(channel).Generate(request, timeout=PATIENCE_S) for _ in range(NUM_STREAMS)
        ]
        load.wait_for_rounds(UNREAD_ROUNDS)
        unread_s = time.monotonic() - began
        assert _resident_bytes(unread.pid) - before < MOST_UNREAD_BYTES
        for call in calls:
            messages = list(call)
            assert [token for message in messages for token in message.token_ids] == wanted
            assert messages[-1].statistics.total_time_s < unread_s, "it was not computed until it was read"
    matrix(record)


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def test_many_more_clients_come_at_once_than_may_wait(
    stage: Stage, matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, clients of one process share a connection.
    own_connection = [*CLIENT_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    monkeypatch.setattr(balancing, "CLIENT_CHANNEL_OPTIONS", own_connection)
    drafter = stage.drafter()
    crowded = stage.verifier([drafter.address], "--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue", str(MAX_QUEUE))
    with stage.load_on(crowded) as own:
        own.measure()
    load = stage.load([drafter.address])
    name = f"{NUM_CLIENTS} clients at once at another verifier, whose queue takes {MAX_QUEUE}"
    with load.fault(name, during_above=0.8) as record:
        greedy = stage.reference.continuations
        wanted = [greedy[number % len(greedy)] for number in range(NUM_CLIENTS)]
        outcomes = asyncio.run(_ask_at_once(crowded, wanted))
        ended = time.monotonic()
        refused = [one for one in outcomes if isinstance(one, QueueFullError)]
        served = [(one, want) for one, want in zip(outcomes, wanted, strict=True) if isinstance(one, Completion)]
        assert refused
        assert all(one.retry_after_s is not None and 0 < one.retry_after_s < 60 for one in refused)
        assert all(f"the queue is full: {MAX_QUEUE} requests are waiting" in str(one) for one in refused)
        assert len(served) >= MAX_NUM_SEQS + MAX_QUEUE
        assert [list(one.token_ids) for one, _ in served] == [want.tokens for _, want in served]
        with stage.load_on(crowded) as own:
            own.wait_until_recovered(ended)
        assert not own.failures
        with Client(crowded.address) as client:
            wait_for(lambda: client.info().requests_running + client.info().requests_waiting == 0, "nobody is left")
    matrix(record)


async def _ask_at_once(verifier: ServiceProcess, wanted: Sequence[Continuation]) -> list[Completion | QueueFullError]:
    """Send all requests at once, each over its own connection; return the completions and the full-queue errors."""
    before = _num_sockets(verifier.pid)
    are_connected = asyncio.Barrier(len(wanted))

    async def ask(one: Continuation) -> Completion | QueueFullError:
        async with AsyncClient(verifier.address) as client:
            await client.info()
            if await are_connected.wait() == 0:
                assert _num_sockets(verifier.pid) - before >= len(wanted)
            try:
                return await client.complete(one.prompt, temperature=0, max_tokens=len(one.tokens))
            except QueueFullError as error:
                return error

    return await asyncio.gather(*map(ask, wanted))


def _num_sockets(pid: int) -> int:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return sum(link.startswith("socket:") for link in links)


def test_a_verifier_is_killed_and_restarted_beside_another(stage: Stage, matrix: Matrix) -> None:
    drafter, listen = stage.drafter(), ("--listen", free_address())
    verifier, other = stage.verifier([drafter.address], *listen), stage.verifier([drafter.address])
    most_at_once = len(stage.reference.continuations) + SAMPLED_AT_ONCE
    name = "another verifier at its drafter killed (SIGKILL) and started again"
    with stage.load_on(other) as load, load.fault(name, during_above=0.8) as record:
        with stage.load_on(verifier) as own:
            own.measure()
            own.wait_for(lambda: _load_of(drafter).sequences > most_at_once, "both have sequences open")
            assert not own.failures
            verifier.kill()
        assert own.failures, "none of its requests was running"
        assert all("cannot be reached" in failure for failure in own.failures)
        load.wait_for(lambda: _load_of(drafter).sessions == 1, "its session has ended")
        load.wait_for(lambda: _load_of(drafter).sequences <= most_at_once, "its sequences are reclaimed")
        verifier = stage.verifier([drafter.address], *listen)
        ended = time.monotonic()
        with stage.load_on(verifier) as own:
            own.wait_until_recovered(ended)
        assert not own.failures
    for one in (verifier, other):
        one.kill()
    wait_for(lambda: _load_of(drafter) == draft_pb2.DrafterLoad(), "nothing is left of either")
    matrix(record)


def _load_of(drafter: Drafter) -> draft_pb2.DrafterLoad:
    with grpc.insecure_channel(drafter.address) as channel:
        return draft_pb2_grpc.DraftingStub(channel).GetDrafterInfo(draft_pb2.GetDrafterInfoRequest()).load
