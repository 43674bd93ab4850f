"""The receiving process of `draftwire bench transport`, which receives tensors as a drafter receives features."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.model.devices import make_current
from draftwire.transport import SharedSegments, TensorReceiver, meet, segment_bytes
from draftwire.transport.mailbox import Mailbox
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc

DTYPE = torch.int32
Context = grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse]


def pattern(num_elements: int) -> torch.Tensor:
    """Return the tensor that is sent, except that its first and last elements are the step's number."""
    return torch.arange(num_elements, dtype=DTYPE).mul_(-1640531527)


def serve(connection: Connection, device: torch.device) -> None:
    """Serve streams; send the port over the connection first, then the arrival times of each stream's steps."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(connection, device))


async def _serve(connection: Connection, device: torch.device) -> None:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    draft_pb2_grpc.add_DraftingServicer_to_server(_Receiver(connection, device), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection.send(port)
    await asyncio.to_thread(connection.poll, None)  # returns when the sender's process ends


class _Receiver(draft_pb2_grpc.DraftingServicer):
    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device

    # Reads and writes through the context, and therefore is not an iterator.
    async def Draft(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Any, context: Context  # noqa: ARG002
    ) -> None:
        """Serve a stream of steps with features; answer each step when its features are on the device."""
        hello = (await context.read()).hello
        shared = SharedSegments()
        if hello.HasField("rendezvous"):
            size = segment_bytes(hello.features.width * DTYPE.itemsize)
            shared = await asyncio.to_thread(meet, hello.rendezvous, list(hello.carriers), size, self._device)
        loader = _Loader(self._device, shared, hello.features.width)
        await context.write(
            pb.DraftResponse(hello=pb.DrafterHello(carrier=loader.receiver.carrier, direct=shared.channel is not None))
        )
        thread = threading.Thread(target=loader.run)
        thread.start()
        reading = asyncio.create_task(_read(context, loader))
        try:
            while isinstance(answer := await loader.answers.get(), pb.DraftResponse):
                await context.write(answer)
        finally:
            reading.cancel()
            loader.inbox.put(None)
            await asyncio.to_thread(thread.join)
        self._connection.send(loader.arrivals)
        if answer is not None:
            await context.abort(grpc.StatusCode.DATA_LOSS, answer)


async def _read(context: Context, loader: _Loader) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        loader.inbox.put(request)
    loader.inbox.put(None)


class _Loader:
    """Loads the features of steps in a separate thread that the channel wakes, like a drafter's engine.

    Attributes:
        arrivals: Monotonic times when each step's features were on the device.
        answers: Answers to write to the stream; a text is an error, None the end.
    """

    def __init__(self, device: torch.device, shared: SharedSegments, num_elements: int) -> None:
        self.receiver = TensorReceiver(device, shared.incoming)
        self.inbox: Mailbox[pb.DraftRequest | bytes | None] = Mailbox()
        self.answers: asyncio.Queue[pb.DraftResponse | str | None] = asyncio.Queue()
        self.arrivals: list[float] = []
        self._device = device
        self._channel = shared.channel
        self._expected = pattern(num_elements).to(device)
        self._loop = asyncio.get_running_loop()

    def run(self) -> None:
        """Load features until the stream ends or a tensor is wrong."""
        make_current(self._device)
        if self._channel is not None:
            self.inbox.watch(self._channel.fileno(), self._read_channel)
        wrong = None
        while wrong is None and (message := self.inbox.get()) is not None:
            try:
                wrong = self._take(message)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self.answers.put_nowait, wrong)
        if self._channel is not None:
            self.inbox.unwatch(self._channel.fileno())
            self._channel.close()

    def _read_channel(self) -> list[bytes] | None:
        assert self._channel is not None
        try:
            return [record.message for record in self._channel.receive()]
        except ConnectionError:
            return None

    def _take(self, message: pb.DraftRequest | bytes) -> str | None:
        """Load a step and answer it the same way; return an error, if any."""
        request = pb.DraftRequest.FromString(message) if isinstance(message, bytes) else message
        features = self.receiver.claim(request.step.features, "features", DTYPE, (None,)).load()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.arrivals.append(time.monotonic())
        step_id, count = request.step.step_id, len(features)
        if not (int(features[0]) == int(features[-1]) == step_id):
            return f"step {step_id}: the {features.nbytes} bytes are of another step"
        if not torch.equal(features[1:-1], self._expected[1 : count - 1]):
            return f"step {step_id}: the {features.nbytes} bytes differ from those that were sent"
        answer = pb.DraftResponse(drafts=pb.Drafts(step_id=step_id, features_read=self.receiver.generation_read))
        if not isinstance(message, bytes):
            self._loop.call_soon_threadsafe(self.answers.put_nowait, answer)
        elif self._channel is None or not self._channel.send(answer.SerializeToString()):
            return f"step {step_id}: the answer does not fit into the ring"
        return None
