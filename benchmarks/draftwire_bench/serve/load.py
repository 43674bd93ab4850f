"""Load on a verifier: client processes, each with its own connection, send requests and record the responses' times.

Times are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
import numpy as np

from draftwire.client.output import Statistics, chunk_from_message
from draftwire.client.request import CLIENT_CHANNEL_OPTIONS, to_error
from draftwire.contract.client_security import LOOPBACK, ClientSecurity, open_async_channel
from draftwire.contract.errors import BenchmarkError
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from draftwire.v1.generate_pb2_grpc import GenerationAsyncStub

CONNECT_TIMEOUT_S = 10.0
# All processes get their plans within this time, and then start together.
START_DELAY_S = 0.1
POLL_S = 0.1
TICK_S = 0.01
# Above either of these, a client may limit the result.
MAX_CPU_SHARE = 0.7
MAX_LAG_S = 0.005


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send."""

    request: bytes  # a GenerateRequest
    not_before_s: float = 0.0  # after the start


@dataclass(frozen=True, slots=True)
class Timeline:
    """A client's record of one request."""

    sent: float
    arrivals: tuple[float, ...]  # of each message with tokens
    counts: tuple[int, ...]  # tokens of each such message
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]  # for each token, whether it is an accepted draft
    num_speculative_tokens: int | None  # as requested; None for the server's number
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy a client process was."""

    cpu_share: float  # of one core
    lag_p99_s: float  # latency of the event loop, 99th percentile

    @property
    def is_saturated(self) -> bool:
        """Return whether this load generator may have limited the result."""
        return self.cpu_share > MAX_CPU_SHARE or self.lag_p99_s > MAX_LAG_S


@dataclass(frozen=True, slots=True)
class _Plan:
    start: float
    slots: list[list[tuple[int, Planned]]]  # (number, request); a slot sends its requests one after another


@dataclass(frozen=True, slots=True)
class _Seen:
    timelines: list[tuple[int, Timeline]]
    load: ClientLoad


class ClientPool:
    """Client processes of one verifier, kept for many runs; as a context manager, ends the processes on exit."""

    def __init__(self, address: str, num_processes: int, security: ClientSecurity = LOOPBACK) -> None:
        # Not forked, because gRPC's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._clients = []
        for number in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (address, security, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"client-{number}", daemon=True)
            process.start()
            theirs.close()
            self._clients.append((process, ours))

    def run(
        self, slots: Sequence[Sequence[Planned]], on_poll: Callable[[], object] = lambda: None
    ) -> tuple[list[Timeline], list[ClientLoad]]:
        """Send all requests, a slot's requests one after another; return the timelines slot by slot, and client loads.

        Args:
            slots: Requests of each slot.
            on_poll: Called every POLL_S seconds while requests run.

        Raises:
            BenchmarkError: If a request fails or a process dies.
        """
        numbers = iter(range(sum(map(len, slots))))
        numbered = [[(next(numbers), planned) for planned in slot] for slot in slots]
        busy = self._clients[: len(slots)]
        start = time.monotonic() + START_DELAY_S
        for index, (_, connection) in enumerate(busy):
            connection.send(_Plan(start, numbered[index :: len(busy)]))
        seen = [self._receive(index, on_poll) for index in range(len(busy))]
        timelines = dict(pair for one in seen for pair in one.timelines)
        return [timelines[number] for number in sorted(timelines)], [one.load for one in seen]

    def _receive(self, index: int, on_poll: Callable[[], object]) -> _Seen:
        process, connection = self._clients[index]
        while not connection.poll(POLL_S):
            if not process.is_alive():
                raise BenchmarkError(f"the process {process.name} has died with status {process.exitcode}")
            on_poll()
        try:
            answer = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise BenchmarkError(f"the process {process.name} has died") from error
        if isinstance(answer, str):
            raise BenchmarkError(f"a request failed: {answer}")
        seen: _Seen = answer
        return seen

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._clients:
            connection.close()
            process.terminate()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _serve(address: str, security: ClientSecurity, connection: Connection) -> None:
    """Run plans in a client process until the other end closes the connection."""
    try:
        while True:
            plan: _Plan = connection.recv()
            try:
                answer: _Seen | str = asyncio.run(_run(address, security, plan))
            except Exception as error:
                answer = _text(error, address)
            connection.send(answer)
    except (EOFError, KeyboardInterrupt):
        return


def _text(error: BaseException, address: str) -> str:
    """Return the text of an error, or of a task group's first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"{address} cannot be reached within {CONNECT_TIMEOUT_S:g} s"
    return str(to_error(error, address, None) if isinstance(error, grpc.RpcError) else error)


async def _run(address: str, security: ClientSecurity, plan: _Plan) -> _Seen:
    timelines: list[tuple[int, Timeline]] = []
    metadata = security.metadata()
    async with open_async_channel(address, security, CLIENT_CHANNEL_OPTIONS) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        stub = GenerationStub(channel)

        async def work(slot: list[tuple[int, Planned]]) -> None:
            for number, planned in slot:
                await asyncio.sleep(plan.start + planned.not_before_s - time.monotonic())
                timelines.append((number, await _request(stub, planned, metadata)))

        await asyncio.sleep(plan.start - time.monotonic())
        lags: list[float] = []
        ticker = asyncio.create_task(_tick(lags))
        began, cpu_began = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for slot in plan.slots:
                group.create_task(work(slot))
        cpu_share = (time.process_time() - cpu_began) / (time.monotonic() - began)
        ticker.cancel()
    return _Seen(timelines, ClientLoad(cpu_share, float(np.percentile(lags or [0.0], 99))))


async def _tick(lags: list[float]) -> None:
    """Measure the latency of the event loop."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(time.monotonic() - due)


async def _request(stub: GenerationAsyncStub, planned: Planned, metadata: tuple[tuple[str, str], ...]) -> Timeline:
    """Send a request and record its timeline, with little work per message."""
    request = pb.GenerateRequest.FromString(planned.request)
    arrivals: list[float] = []
    counts: list[int] = []
    token_ids: list[int] = []
    drafted: list[bool] = []
    message = pb.GenerateResponse()
    sent = time.monotonic()
    async for message in stub.Generate(request, metadata=metadata):
        if message.token_ids:
            arrivals.append(time.monotonic())
            counts.append(len(message.token_ids))
            token_ids += message.token_ids
            drafted += message.drafted
    statistics = chunk_from_message(message, "").statistics
    if statistics is None:
        raise BenchmarkError("the server ended a stream without statistics")
    k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
    return Timeline(sent, tuple(arrivals), tuple(counts), tuple(token_ids), tuple(drafted), k, statistics)
