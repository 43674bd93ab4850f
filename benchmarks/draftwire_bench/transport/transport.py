"""Latency of tensors from one process of this host to another, for every carrier.

The sender acts as a verifier and the receiver as a drafter, with a stream of `Drafting.Draft`, and the rendezvous,
segments and rings of `draftwire.transport`. The latency of a step is from the tensor in the sender's device memory to
the tensor in the receiver's, by the monotonic clock, which all processes of a host share; one step runs at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.client_security import LOOPBACK, open_async_channel
from draftwire.contract.errors import BenchmarkError
from draftwire.model.devices import make_current
from draftwire.server.counting import CountingChannel
from draftwire.transport import (
    Channel,
    Outgoing,
    Rendezvous,
    SharedSegments,
    TensorSender,
    carrier_name,
    offered_carriers,
    segment_bytes,
)
from draftwire.transport.encoding import Encoded, encode_step
from draftwire.transport.mailbox import Mailbox
from draftwire.transport.rendezvous import create_segment
from draftwire.transport.ring import MAX_MESSAGE_BYTES
from draftwire.transport.segment import SegmentError
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1.draft_pb2_grpc import DraftingStub
from draftwire_bench.transport.receiver import DTYPE, pattern, serve

WARMUP = 5
LONGEST_S = 5.0
TIMEOUT_S = 60.0


class Way(NamedTuple):
    """How a message travels: the carrier of its tensor, and the ring (`is_direct`) or the gRPC stream."""

    carrier: pb.Carrier
    is_direct: bool

    @property
    def message_by(self) -> str:
        """Return the message's transport as text."""
        return "ring" if self.is_direct else "gRPC"


WAYS = (
    Way(pb.CARRIER_BYTES, is_direct=False),
    Way(pb.CARRIER_BYTES, is_direct=True),
    Way(pb.CARRIER_SHM, is_direct=False),
    Way(pb.CARRIER_SHM, is_direct=True),
    Way(pb.CARRIER_CUDA_IPC, is_direct=True),
)


@dataclass(frozen=True)
class TransportOptions:
    """Options of a measurement; sizes in bytes, multiples of 4."""

    sender_device: torch.device
    receiver_device: torch.device
    sizes: Sequence[int]
    repeats: int  # of each size and way; fewer if they take longer than LONGEST_S


@dataclass(frozen=True)
class Row:
    """The latencies of one size and way, or `missing` with the reason; a row without a size is for all sizes."""

    carrier: str
    message_by: str
    num_bytes: int | None = None
    repeats: int = 0
    median_us: float | None = None
    p99_us: float | None = None
    missing: str = ""

    @property
    def gb_per_s(self) -> float | None:
        """Return the bandwidth at the median latency."""
        return self.num_bytes / self.median_us / 1e3 if self.num_bytes and self.median_us else None


def measure_transport(options: TransportOptions, announce: Callable[[str], object] = lambda _: None) -> list[Row]:
    """Measure all sizes and ways; `announce` is called with each way.

    Raises:
        BenchmarkError: If received bytes are wrong or missing.
    """
    make_current(options.sender_device)
    rows = []
    with _receiver_process(options.receiver_device) as (connection, address):
        for way in WAYS:
            announce(f"{carrier_name(way.carrier)}, messages by {way.message_by}")
            rows += _measure_way(way, connection, address, options)
    return rows


@contextlib.contextmanager
def _receiver_process(device: torch.device) -> Iterator[tuple[Connection, str]]:
    """Run a receiver; yield the connection to its process, and its address."""
    context = multiprocessing.get_context("spawn")  # gRPC's threads and CUDA do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device), name="receiver", daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, f"127.0.0.1:{_received(ours)}"
    finally:
        process.terminate()
        process.join()


def _received(connection: Connection) -> object:
    try:
        if connection.poll(TIMEOUT_S):
            return connection.recv()
    except (EOFError, ConnectionError):
        pass
    raise BenchmarkError("the receiving process has died or does not respond")


def _measure_way(way: Way, connection: Connection, address: str, options: TransportOptions) -> list[Row]:
    name = carrier_name(way.carrier)
    largest = max(options.sizes)
    if way.carrier not in offered_carriers([way.carrier], options.sender_device):
        return [Row(name, way.message_by, missing=f"not possible for tensors on {options.sender_device}")]
    departures = None
    with _connected(way, address, largest, options.sender_device) as stream:
        if stream is not None:
            departures = {size: stream.send_all(size, options.repeats) for size in options.sizes}
    arrivals = _received(connection)
    assert isinstance(arrivals, list)
    if departures is None:
        return [Row(name, way.message_by, missing=_why_not(way.carrier, largest, options.receiver_device))]
    rows = []
    for size, departed in departures.items():
        if not departed:
            missing = f"a message of the ring has at most {MAX_MESSAGE_BYTES} bytes"
            rows.append(Row(name, way.message_by, size, missing=missing))
            continue
        arrived, arrivals = arrivals[: len(departed)], arrivals[len(departed) :]
        taken_us = 1e6 * (np.array(arrived) - np.array(departed))[WARMUP:]
        median, p99 = (float(value) for value in np.percentile(taken_us, (50, 99)))
        rows.append(Row(name, way.message_by, size, len(taken_us), median, p99))
    return rows


def _why_not(carrier: pb.Carrier, num_bytes: int, device: torch.device) -> str:
    try:
        _, fds = create_segment(carrier, segment_bytes(num_bytes), device)
    except SegmentError as error:
        return str(error)
    for fd in fds:
        os.close(fd)
    return "the processes could not share a segment"


@contextlib.contextmanager
def _connected(way: Way, address: str, largest: int, device: torch.device) -> Iterator[_Stream | None]:
    """Open a stream with a way and yield it; yield None if the processes cannot share memory."""
    hello = pb.VerifierHello(
        features=pb.FeatureSpec(width=largest // DTYPE.itemsize, dtype=pb.DTYPE_INT32),
        carriers=list(dict.fromkeys([way.carrier, pb.CARRIER_BYTES])),
    )
    with _running_loop() as loop, contextlib.ExitStack() as stack:
        stream = _Stream(way, device, loop)
        stack.callback(stream.close)
        with ThreadPoolExecutor(1) as pool, Rendezvous() as rendezvous:
            sharing = None
            if way != Way(pb.CARRIER_BYTES, is_direct=False):
                hello.rendezvous.CopyFrom(rendezvous.encode())
                sharing = pool.submit(rendezvous.serve, list(hello.carriers), [], 0, device)
            talking = asyncio.run_coroutine_threadsafe(stream.talk(address, hello), loop)
            stack.callback(talking.result, TIMEOUT_S)
            stack.callback(stream.end)
            answer = stream.next()
        is_ready = stream.use(SharedSegments() if sharing is None else sharing.result(), answer.hello)
        yield stream if is_ready else None


@contextlib.contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Stream:
    """The sender's end, like a verifier's: messages are written and read on the event loop or through the ring."""

    def __init__(self, way: Way, device: torch.device, loop: asyncio.AbstractEventLoop) -> None:
        self._way = way
        self._device = device
        self._loop = loop
        self._inbox: Mailbox[pb.DraftResponse | Exception] = Mailbox()
        self._outbox: asyncio.Queue[tuple[pb.DraftStep, Outgoing] | None] = asyncio.Queue()
        self._channel: Channel | None = None
        self._sender = TensorSender(device)
        self._last_step = 0

    def use(self, shared: SharedSegments, hello: pb.DrafterHello) -> bool:
        """Use the shared segments; return False if the carrier or the ring of this way is not available."""
        self._sender = TensorSender(self._device, shared.outgoing)
        if shared.channel is not None:
            self._channel = shared.channel
            self._inbox.watch(shared.channel.fileno(), self._read_channel)
        has_channel = self._channel is not None or not self._way.is_direct
        return has_channel and self._sender.carrier == hello.carrier == self._way.carrier

    async def talk(self, address: str, hello: pb.VerifierHello) -> None:
        """Open the stream, and read and write until both sides have closed it."""
        async with open_async_channel(address, LOOPBACK, CHANNEL_OPTIONS) as channel:
            counting: Any = CountingChannel(channel, lambda *_: None)  # accepts encoded messages
            call = DraftingStub(counting).Draft()
            try:
                await call.write(pb.DraftRequest(hello=hello))
                writing = asyncio.create_task(self._write(call))
                while isinstance(response := await call.read(), pb.DraftResponse):
                    self._inbox.put(response)
                writing.cancel()
                if await call.code() != grpc.StatusCode.OK:
                    raise BenchmarkError(f"the receiver: {await call.details()}")
            except (grpc.aio.AioRpcError, BenchmarkError) as error:
                self._inbox.put(error)

    async def _write(self, call: grpc.aio.StreamStreamCall[Encoded, pb.DraftResponse]) -> None:
        while (entry := await self._outbox.get()) is not None:
            step, features = entry
            await call.write(encode_step(step, features.finish(step.features)))
        await call.done_writing()

    def _read_channel(self) -> list[pb.DraftResponse] | None:
        assert self._channel is not None
        try:
            return [pb.DraftResponse.FromString(record.message) for record in self._channel.receive()]
        except ConnectionError:
            return None

    def next(self) -> pb.DraftResponse:
        """Return the next answer.

        Raises:
            BenchmarkError: If there is none in time, or the receiver has failed.
        """
        try:
            answer = self._inbox.get(TIMEOUT_S)
        except queue.Empty:
            raise BenchmarkError(f"no answer of the receiver within {TIMEOUT_S:g} s") from None
        if isinstance(answer, Exception):
            raise BenchmarkError(str(answer)) from answer
        return answer

    def send_all(self, size: int, repeats: int) -> list[float]:
        """Send tensors, each after the previous answer; return their departure times, none if tensors do not fit."""
        tensor = pattern(size // DTYPE.itemsize).to(self._device)
        departed: list[float] = []
        for number in range(WARMUP + repeats):
            if number > WARMUP and departed[-1] > departed[0] + LONGEST_S:
                break
            self._last_step += 1
            tensor[0] = tensor[-1] = self._last_step
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            began = time.monotonic()
            if not self._send(tensor) and not departed:
                return []
            departed.append(began)
            self._sender.release(self.next().drafts.features_read, "features_read")
        return departed

    def _send(self, tensor: torch.Tensor) -> bool:
        features = self._sender.begin(tensor.dtype, tensor.shape)
        if features.carrier != self._way.carrier:
            raise BenchmarkError(f"no room for {tensor.nbytes} bytes in the shared memory")
        features.tensor.copy_(tensor, non_blocking=True)
        features.seal()
        step = pb.DraftStep(step_id=self._last_step)
        if not self._way.is_direct:
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, (step, features))
            return True
        assert self._channel is not None
        return self._channel.send(encode_step(step, features.finish(step.features)).data)

    def end(self) -> None:
        """End the stream."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, None)

    def close(self) -> None:
        """Release the rings."""
        if self._channel is not None:
            self._inbox.unwatch(self._channel.fileno())
            self._channel.close()
