"""The `Drafting` service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import Message

from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.answer import Answer
from drafter_service.engine.session import Session
from drafter_service.server.engine_thread import EngineFailureError, EngineThread
from drafter_service.server.handshake import settle_terms
from drafter_service.server.metrics import DrafterCollector
from drafter_service.server.sequence_log import SequenceWatch
from drafter_service.server.step_decoder import StepDecoder
from drafter_service.server.stream import Context, DraftStream, last_read_bytes
from draftwire.contract.addresses import MAX_MESSAGE_BYTES
from draftwire.contract.errors import InvalidArgumentError, MismatchError, QueueFullError, UnavailableError
from draftwire.contract.retry import retry_metadata
from draftwire.contract.validation import DENSE, NONE, TOP_N
from draftwire.contract.version import PROTOCOL_VERSION, VERSION
from draftwire.model.tensors import DTYPES, WIRE_DTYPES, encode_tensor
from draftwire.server.counting import CountingInterceptor
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.transport import (
    ALL_CARRIERS,
    SharedSegments,
    TensorReceiver,
    TensorSender,
    carrier_name,
    meet,
    offered_carriers,
    ring_bytes,
    segment_bytes,
)
from draftwire.transport.traffic import Direction, Traffic
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import draft_pb2_grpc
from draftwire_kernels import NOISE_VERSION

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Drafting"].full_name
# Verifiers seldom call, one at a time. A window has room for the steps of most batches.
READING = ReadingLimits(MAX_MESSAGE_BYTES, 2, 1, 64, 16, window_bytes=4 * 1024 * 1024)
# Seconds after which a refused verifier may try again.
RETRY_S = 1.0
# Shared memory has room for at least this many rows of features: the default of a step with prompts.
PROMPT_ROWS = 512
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineFailureError: grpc.StatusCode.INTERNAL,
}


def describe_drafter(engine: EngineThread, head_name: str, dtype: torch.dtype) -> pb.GetDrafterInfoResponse:
    """Return a drafter's description of its head and limits, without load and memory."""
    head, limits = engine.engine.head, engine.engine.limits
    spec = head.spec
    return pb.GetDrafterInfoResponse(
        version=VERSION,
        method=spec.method,
        head=head_name,
        head_fingerprint=head.fingerprint,
        target_vocab_size=spec.target_vocab_size,
        target_hidden_size=spec.target_hidden_size,
        target_num_layers=spec.target_num_layers,
        features=pb.FeatureSpec(layers=spec.feature_layers, width=spec.feature_width, dtype=WIRE_DTYPES[dtype]),
        draft_vocab_size=spec.draft_vocab_size,
        max_num_speculative_tokens=limits.max_num_speculative_tokens,
        max_sequences=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        draft_logits_forms=[NONE, DENSE, TOP_N],
        device=str(engine.engine.device),
        dtype=str(dtype).removeprefix("torch."),
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        fusion=None if head.fusion is None else head.fusion.describe(),
    )


def _retry_metadata(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        return retry_metadata(str(error), error.retry_after_s)
    return ()


def feature_segment_bytes(features: pb.FeatureSpec, terms: SessionTerms) -> int:
    """Return the size of the shared memory for a session's features."""
    num_rows = max(terms.max_sequences * (terms.num_speculative_tokens + 1), PROMPT_ROWS)
    return segment_bytes(num_rows * features.width * DTYPES[features.dtype].itemsize)


class DraftingService(draft_pb2_grpc.DraftingServicer):
    """Serves the streams of all verifiers with one engine.

    Attributes:
        collector: The drafter's metrics.
        interceptor: Counts the messages of gRPC. The server must have it.
        reader: Reads the hellos of streams; the server reads the messages of other calls with it.
    """

    def __init__(
        self,
        engine: EngineThread,
        head_name: str,
        dtype: torch.dtype,
        carriers: Sequence[pb.Carrier] = ALL_CARRIERS,
        rendezvous_dir: Path | None = None,
    ) -> None:
        """`carriers` are the allowed carriers, best first; `rendezvous_dir` is the directory of `meet`."""
        self._engine = engine
        self._device = engine.engine.device
        self._carriers = offered_carriers(carriers, self._device)
        self._rendezvous_dir = rendezvous_dir
        self._info = describe_drafter(engine, head_name, dtype)
        self._max_sessions = engine.engine.limits.max_sessions
        self._num_sessions = 0
        self._num_fusions = 0  # number of fusion weights that are being sent
        self._streams: set[DraftStream] = set()
        self._drain_timeout_s: float | None = None  # set when the drafter drains
        self._all_left = asyncio.Event()
        self._traffic = Traffic()
        self.interceptor = CountingInterceptor(SERVICE_NAME, self._count)
        self.collector = DrafterCollector(
            head_name, lambda: engine.state, self._num_unanswered, engine.times.histogram, self._traffic
        )
        self.reader = MessageReader(READING, self.collector.count_refused)
        token_ids = engine.engine.head.draft_token_ids
        self._draft_token_ids = None if token_ids is None else encode_tensor(token_ids.int())

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sessions and sequences, and give the verifiers `timeout_s` seconds to leave."""
        self._drain_timeout_s = timeout_s
        self._engine.drain()
        for stream in self._streams:
            stream.drain(timeout_s)
        self._all_left.clear()
        if not self._num_sessions:
            return
        try:
            await asyncio.wait_for(self._all_left.wait(), timeout_s)
        except TimeoutError:
            logger.warning("ending %d sessions that are left after %g s", self._num_sessions, timeout_s)

    async def GetDrafterInfo(  # noqa: N802
        self, request: pb.GetDrafterInfoRequest, context: Any  # noqa: ARG002
    ) -> pb.GetDrafterInfoResponse:
        """Return the head, what it needs from a target and the drafter's limits."""
        return self._current_info()

    async def GetFeatureFusion(  # noqa: N802
        self, request: pb.GetFeatureFusionRequest, context: Any
    ) -> AsyncIterator[pb.FeatureFusionChunk]:
        """Yield the weights with which a verifier fuses features for the head."""
        head = self._engine.engine.head
        if head.fusion is None or request.head_fingerprint != head.fingerprint:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"head_fingerprint: asked for {request.head_fingerprint!r}, the head is {head.fingerprint!r}"
                + ("" if head.fusion else ", which takes features as they are"),
            )
            return
        if self._num_fusions >= self._max_sessions:
            self.collector.count_refused()
            text = f"{self._num_fusions} verifiers are being sent the fusion; try again later"
            logger.warning("call of %s refused: %s", context.peer(), text)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text, retry_metadata(text, RETRY_S))
        self._num_fusions += 1
        try:
            chunks = head.fusion.chunks()
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield pb.FeatureFusionChunk(data=chunk)
        finally:
            self._num_fusions -= 1

    # Reads and writes through the context, in two tasks, and so is not an iterator.
    async def Draft(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Any, context: Context  # noqa: ARG002
    ) -> None:
        """Serve one verifier's stream."""
        peer = context.peer()  # read now: reading the peer of an ended call may crash the process
        try:
            await self._serve(context, peer)
            return
        except tuple(STATUS_CODES) as error:
            refusal = STATUS_CODES[type(error)], str(error), _retry_metadata(error)
        logger.warning("stream of %s ended: %s", peer, refusal[1])
        # Outside the handler: gRPC keeps the exception of `abort`, which would keep the error, its frames and shared
        # memory.
        await context.abort(*refusal)

    async def _serve(self, context: Context, peer: str) -> None:
        try:
            request = await self.reader.read(context)
        except TimeoutError as error:
            raise TimeoutError(f"no hello: {error}") from None
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("message", None, "the first message must be the hello")
        terms = settle_terms(request, self._info)
        if self._drain_timeout_s is not None:
            raise UnavailableError("the drafter is draining and takes no further sessions")
        if self._num_sessions >= self._max_sessions:
            self.collector.count_refused()
            text = f"max_sessions = {self._max_sessions}: as many verifiers are already connected"
            raise QueueFullError(text, RETRY_S)
        self._num_sessions += 1
        try:
            shared = await self._share(request.hello, terms)
            await self._run(context, peer, request.hello.features, terms, shared)
        finally:
            self._num_sessions -= 1
            if not self._num_sessions:
                self._all_left.set()

    async def _share(self, hello: pb.VerifierHello, terms: SessionTerms) -> SharedSegments:
        """Return the memory shared with a verifier on this host, if any."""
        carriers = [carrier for carrier in hello.carriers if carrier in self._carriers]
        if carriers == [pb.CARRIER_BYTES] or not hello.HasField("rendezvous"):
            return SharedSegments()
        size = feature_segment_bytes(hello.features, terms)
        rings = ring_bytes(terms.max_sequences, terms.num_speculative_tokens)
        arguments = hello.rendezvous, carriers, size, self._device, self._rendezvous_dir, rings
        return await asyncio.to_thread(meet, *arguments)

    async def _run(
        self, context: Context, peer: str, features: pb.FeatureSpec, terms: SessionTerms, shared: SharedSegments
    ) -> None:
        receiver = TensorReceiver(self._device, shared.incoming)
        sender = TensorSender(self._device, shared.outgoing)
        decoder = StepDecoder(
            self._info.target_vocab_size,
            features.width,
            DTYPES[features.dtype],
            terms.num_speculative_tokens,
            receiver,
            is_fused=bool(features.fused_for),
        )
        stream = DraftStream(
            context,
            decoder,
            self._engine,
            receiver,
            sender,
            SequenceWatch(terms.verifier),
            self._traffic,
            terms.mode.row_bytes(self._info.draft_vocab_size),
            shared.channel,
        )

        def deliver(answer: Answer | Exception) -> None:
            stream.deliver(answer)
            self._engine.later(partial(self.collector.count, answer))

        opening = self._engine.open_session(terms, deliver)
        try:
            session = await asyncio.wrap_future(opening)
            logger.info(
                "session of %s at %s opened; %s features by %s, draft logits by %s, messages %s",
                terms.verifier,
                peer,
                "fused" if features.fused_for else "raw",
                carrier_name(receiver.carrier),
                carrier_name(sender.carrier),
                "direct" if shared.channel else "by the stream",
            )
            answer = self._hello(receiver.carrier, sender.carrier, is_direct=shared.channel is not None)
            await context.write(answer)
            self._streams.add(stream)
            if self._drain_timeout_s is not None:  # draining began after this session was accepted
                stream.drain(self._drain_timeout_s)
            await stream.run(session)
        finally:
            self._streams.discard(stream)
            stream.close()
            opening.add_done_callback(self._close)
            logger.info("session of %s at %s closed", terms.verifier, peer)

    def _close(self, opening: Future[Session]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._engine.close_session(opening.result())

    def _hello(self, carrier: pb.Carrier, logits_carrier: pb.Carrier, *, is_direct: bool) -> pb.DraftResponse:
        hello = pb.DrafterHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            info=self._current_info(),
            draft_token_ids=self._draft_token_ids,
            carrier=carrier,
            logits_carrier=logits_carrier,
            direct=is_direct,
        )
        return pb.DraftResponse(hello=hello)

    def _count(self, direction: Direction, message: Message, num_bytes: int) -> None:
        """Count a message of gRPC."""
        self._traffic.count_message("grpc", direction, message, num_bytes)
        if direction == "received":
            last_read_bytes.set(num_bytes)

    def _num_unanswered(self) -> int:
        return sum(stream.num_unanswered for stream in list(self._streams))

    def _current_info(self) -> pb.GetDrafterInfoResponse:
        info = pb.GetDrafterInfoResponse()
        info.CopyFrom(self._info)
        self._engine.load.encode(info.load)
        info.memory.CopyFrom(self._engine.engine.memory)
        return info
