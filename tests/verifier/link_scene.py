"""A link to a fake drafter."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.transport import Channel, TensorReceiver, TensorSender
from draftwire.transport.traffic import Traffic
from draftwire.v1 import config_pb2, draft_pb2_grpc, generate_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from verifier_service.drafters.connection import DrafterLink
from verifier_service.drafters.stream import Connected, Disconnected, LinkEvent, Loaded, Stream

READY = generate_pb2.DRAFTER_STATE_READY
REFUSED = generate_pb2.DRAFTER_STATE_REFUSED
CONNECTING = generate_pb2.DRAFTER_STATE_CONNECTING
WAIT_S = 60.0
CPU = torch.device("cpu")
VOCAB, HIDDEN, NUM_LAYERS = 20, 2, 4
TARGET: Any = SimpleNamespace(
    name="org/target",
    fingerprint="beef",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=NUM_LAYERS,
    max_model_len=64,
    device=CPU,
)
RUNNER = asyncio.Runner()  # one loop for all tests: gRPC's threads outlive a test
atexit.register(RUNNER.close)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop that all tests of links share; its links reconnect after short delays."""

    @pytest.mark.usefixtures("short_retries")
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        RUNNER.run(asyncio.wait_for(test(*args, **kwargs), 4 * WAIT_S))

    return run


def make_info(**changes: Any) -> pb.GetDrafterInfoResponse:
    """Return the info of a head that fits the target, with `changes`; `layers`, `width`, `dtype`: of its features."""
    layers = changes.pop("layers", [1, 3])
    features = pb.FeatureSpec(
        layers=layers,
        width=changes.pop("width", len(layers) * HIDDEN),
        dtype=changes.pop("dtype", pb.DTYPE_BFLOAT16),
    )
    values: dict[str, Any] = {
        "method": "eagle3",
        "head": "org/head",
        "head_fingerprint": "f00d",
        "target_vocab_size": VOCAB,
        "target_hidden_size": HIDDEN,
        "target_num_layers": NUM_LAYERS,
        "features": features,
        "draft_vocab_size": VOCAB,
        "max_num_speculative_tokens": 6,
        "max_sequences": 5,
        "max_model_len": 48,
        "draft_logits_forms": [config_pb2.DRAFT_LOGITS_FORM_NONE, config_pb2.DRAFT_LOGITS_FORM_TOP_N],
        "protocol_version": PROTOCOL_VERSION,
        "noise_version": NOISE_VERSION,
    }
    return pb.GetDrafterInfoResponse(**{**values, **changes})


class Drafter(draft_pb2_grpc.DraftingServicer):
    """A drafter with a configurable hello, which answers each step without drafts."""

    def __init__(self, info: pb.GetDrafterInfoResponse | None = None, hello: dict[str, Any] | None = None) -> None:
        self.info = info or make_info()
        self.hello = hello or {}  # changed fields of the DrafterHello
        self.hellos: list[pb.VerifierHello] = []
        self.reads = True
        self.num_keep_alives = 0
        self.abort: tuple[grpc.StatusCode, str] | None = None
        self.fusion_requests: list[str] = []
        self.fusion_data = b""
        self.padding = b""  # bytes added to each answer

    async def GetFeatureFusion(  # noqa: N802
        self,
        request: pb.GetFeatureFusionRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.FeatureFusionChunk]:
        self.fusion_requests.append(request.head_fingerprint)
        for begin in range(0, len(self.fusion_data), 7):
            yield pb.FeatureFusionChunk(data=self.fusion_data[begin : begin + 7])

    async def GetDrafterInfo(self, request: Any, context: Any) -> pb.GetDrafterInfoResponse:  # noqa: ARG002, N802
        return self.info

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        self.hellos.append((await anext(request_iterator)).hello)
        if self.abort is not None:
            await context.abort(*self.abort)
        yield pb.DraftResponse(hello=pb.DrafterHello(**{"info": self.info, "carrier": pb.CARRIER_BYTES, **self.hello}))
        if not self.reads:
            await asyncio.Event().wait()
        async for request in request_iterator:
            if request.HasField("keep_alive"):
                self.num_keep_alives += 1
                continue
            drafts = pb.Drafts(step_id=request.step.step_id)
            if self.padding:
                drafts.tokens.data = self.padding
            yield pb.DraftResponse(drafts=drafts)


async def serve(
    drafter: Drafter, port: int = 0, compression: grpc.Compression | None = None
) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS, compression=compression)
    draft_pb2_grpc.add_DraftingServicer_to_server(drafter, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


class Linked:
    """A running link and the events that it posted. An ended stream is released at once, unless `releases` is false."""

    def __init__(self, port: int, config: dict[str, Any], **options: Any) -> None:
        self.releases = True
        self.shown: list[int] = []  # the drafter's state at each event
        self.events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        settings = speculative_config_from_mapping(config)
        self.loads: list[pb.DrafterLoad] = []  # reported outside of answers
        self.link = DrafterLink(f"127.0.0.1:{port}", TARGET, settings, 8, self._post, Traffic(), **options)
        self.task = asyncio.create_task(self.link.run())

    def _post(self, event: LinkEvent) -> None:
        self.shown.append(self.link.status.state)
        if isinstance(event, Loaded):
            self.loads.append(event.load)
        else:
            if isinstance(event, Disconnected) and self.releases:
                event.stream.release()
            self.events.put_nowait(event)

    async def next(self, timeout_s: float = WAIT_S) -> LinkEvent:
        return await asyncio.wait_for(self.events.get(), timeout_s)

    async def connected(self) -> Stream:
        event = await self.next()
        assert isinstance(event, Connected)
        assert self.link.status.state == READY
        return event.stream

    async def wait_for_state(self, state: int) -> str:
        """Wait until the drafter has this state with a detail; return the detail."""
        end = time.monotonic() + WAIT_S
        while self.link.status.state != state or not self.link.status.detail:
            assert time.monotonic() < end, self.link.status
            await asyncio.sleep(0.005)
        return self.link.status.detail

    async def refused(self) -> str:
        """Wait until the drafter is refused; return the reason."""
        return await self.wait_for_state(REFUSED)


@contextlib.asynccontextmanager
async def linked(
    drafter: Drafter, config: dict[str, Any] | None = None, *, serve: Any = serve, **options: Any
) -> AsyncIterator[Linked]:
    server, port = await serve(drafter)
    own = Linked(port, config or {}, **options)
    try:
        yield own
    finally:
        own.task.cancel()
        await asyncio.gather(own.task, return_exceptions=True)
        await server.stop(None)


def direct_stream(channel: Channel, cancel: Callable[[], object] = lambda: None) -> Stream:
    """Return a stream that sends its messages through `channel`, on the running event loop."""
    sender, receiver, head = TensorSender(CPU), TensorReceiver(CPU), cast("Any", SimpleNamespace())
    return Stream(generate_pb2.DrafterStatus(), head, cancel, sender, receiver, lambda *_: None, Traffic(), channel)


def response(**parts: Any) -> bytes:
    return pb.DraftResponse(**parts).SerializeToString()


async def end(own: Linked) -> float:
    """Cancel the link; return the seconds until it has ended."""
    began = time.monotonic()
    own.task.cancel()
    await asyncio.wait([own.task], timeout=WAIT_S)
    assert own.task.cancelled()
    return time.monotonic() - began
