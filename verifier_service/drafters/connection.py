"""The stream to one drafter: connection, handshake, reconnection. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import grpc
import torch
from google.protobuf.message import Message

from draftwire.contract import validation as cfg
from draftwire.contract.addresses import KEEP_ALIVE_S, MAX_MESSAGE_BYTES, receiving_at_most
from draftwire.contract.client_security import LOOPBACK, ClientSecurity, open_async_channel
from draftwire.contract.errors import InvalidArgumentError, MismatchError
from draftwire.model.fusion import FeatureFusion, fusion_bytes, load_fusion
from draftwire.server.counting import CountingChannel
from draftwire.transport import (
    ALL_CARRIERS,
    Rendezvous,
    Segment,
    SharedSegments,
    TensorReceiver,
    TensorSender,
    carrier_name,
    offered_carriers,
    segment_bytes,
)
from draftwire.transport.encoding import Encoded
from draftwire.transport.traffic import Direction, Traffic
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2
from verifier_service.drafters.handshake import Handshake
from verifier_service.drafters.stream import Answered, Connected, Disconnected, Draining, LinkEvent, Loaded, Stream
from verifier_service.drafters.threads import in_thread
from verifier_service.target.target import Target

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 5.0
# Seconds of rest after an expulsion; doubled each time, and reset after a stream that lasts longer than the maximum.
EXPELLED_RETRY_S = (60.0, 600.0)
FUSION_TIMEOUT_S = 60.0
# Seconds for the drafter's hello, before which the drafter captures graphs. The graphs are dropped with a session, so
# the drafter would start again if the verifier gave up too early.
HELLO_TIMEOUT_S = 60.0
CONNECTED_STATES = {
    generate_pb2.DRAFTER_STATE_READY,
    generate_pb2.DRAFTER_STATE_DRAINING,
    generate_pb2.DRAFTER_STATE_SLOW,
    generate_pb2.DRAFTER_STATE_PROBING,
}
# Seconds between queries of a drafter's memory, and of its load while no answer reports it.
INFO_EVERY_S = 1.0
# Maximum length of a status' detail, characters; parts of the text may be the drafter's.
MAX_DETAIL = 500
# Maximum size of a hello with the ids of the draft vocabulary, of a piece of a fusion, and of an answer without logits.
LEAST_ANSWER_BYTES = 8 << 20
# By description, which includes the digest of the weights: equal heads share fusion weights.
_fusions: WeakValueDictionary[tuple[torch.device, bytes, bytes], FeatureFusion] = WeakValueDictionary()


_Call = grpc.aio.StreamStreamCall[draft_pb2.DraftRequest | Encoded, draft_pb2.DraftResponse]
_DETAILS = {
    generate_pb2.DRAFTER_STATE_SLOW: "is late too often: gets no sequences for a while",
    generate_pb2.DRAFTER_STATE_PROBING: "is on trial with one sequence",
}


class DrafterLink:
    """Keeps a stream to one drafter open while the verifier runs."""

    def __init__(
        self,
        address: str,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        max_sequences: int,
        post: Callable[[LinkEvent], None],
        traffic: Traffic,
        security: ClientSecurity = LOOPBACK,
        host: str | None = None,
        carriers: Sequence[draft_pb2.Carrier] = ALL_CARRIERS,
        rendezvous_dir: Path | None = None,
        *,
        fuses_features: bool = True,
        confidences: bool = False,
    ) -> None:
        """
        Args:
            address: HOST:PORT of the drafter.
            target: The target.
            config: The verifier's settings.
            max_sequences: Maximum sequences at the drafter.
            post: Receives the events of the stream.
            traffic: Counts messages and bytes.
            security: TLS and token for the drafter.
            host: Name in the drafter's certificate; by default the host of the address.
            carriers: Allowed carriers, best first.
            rendezvous_dir: Directory of the `Rendezvous`.
            fuses_features: Whether features are fused if the head supports it.
            confidences: Whether answers have confidences.
        """
        self.status = generate_pb2.DrafterStatus(address=address, state=generate_pb2.DRAFTER_STATE_CONNECTING)
        self._address = address
        self._target = target
        self._config = config
        self._max_sequences = max_sequences
        self._post = post
        self._traffic = traffic
        self._security = security
        self._host = host
        self._rendezvous_dir = rendezvous_dir
        self._fuses_features = fuses_features
        self._on_trial = False
        self._expelled_at = -math.inf
        self._stream: Stream | None = None
        self._carriers = offered_carriers(carriers, target.device)
        self._handshake = Handshake(target, config, max_sequences, self._carriers, confidences=confidences)

    async def run(self) -> None:
        """Connect, serve and reconnect until cancelled."""
        delay, expelled_delay = BACKOFF_S[0], EXPELLED_RETRY_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._serve()
            except Exception as error:
                if isinstance(error, _ExpelledError) or _is_too_large(error):
                    self._note(generate_pb2.DRAFTER_STATE_EXPELLED, f"expelled: {_text(error)}")
                    self._on_trial = True
                    self._expelled_at = time.monotonic()
                    if time.monotonic() - began > EXPELLED_RETRY_S[1]:
                        expelled_delay = EXPELLED_RETRY_S[0]
                    delay, expelled_delay = expelled_delay, min(2 * expelled_delay, EXPELLED_RETRY_S[1])
                elif _is_refusal(error):
                    self._note(generate_pb2.DRAFTER_STATE_REFUSED, _text(error))
                    delay = REFUSED_RETRY_S
                else:
                    if not isinstance(error, (grpc.aio.AioRpcError, TimeoutError)):
                        logger.exception("drafter %s: the stream failed", self._address)
                    self._note(generate_pb2.DRAFTER_STATE_CONNECTING, _text(error))
                    has_served = time.monotonic() - began > CONNECT_TIMEOUT_S
                    delay = BACKOFF_S[0] if has_served else min(2 * delay, BACKOFF_S[1])
            await asyncio.sleep(delay * random.uniform(0.5, 1))

    @property
    def is_needed(self) -> bool:
        """Return whether the link is kept although its address is no longer named.

        A link is kept while it has a stream, and for the maximum rest after an expulsion, which a new link would not
        know about.
        """
        return self.status.state in CONNECTED_STATES or time.monotonic() < self._expelled_at + EXPELLED_RETRY_S[1]

    def _note(self, state: generate_pb2.DrafterState, detail: str) -> None:
        if len(detail) > MAX_DETAIL:
            detail = detail[: MAX_DETAIL - 3] + "..."
        if detail and detail != self.status.detail:
            logger.warning("drafter %s: %s", self._address, detail)
        self.status.state, self.status.detail = state, detail

    def _show(self, stream: Stream, state: generate_pb2.DrafterState) -> None:
        if stream is self._stream and self.status.state != generate_pb2.DRAFTER_STATE_DRAINING:
            self._on_trial = self._on_trial and state != generate_pb2.DRAFTER_STATE_READY
            self._note(state, _DETAILS.get(state, ""))

    async def _serve(self) -> None:
        options: list[tuple[str, int | str]] = [
            *receiving_at_most(self._largest_answer),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self._host is not None:
            options.append(("grpc.ssl_target_name_override", self._host))
        async with open_async_channel(self._address, self._security, options) as channel:
            counting: Any = CountingChannel(channel, self._count)
            stub: draft_pb2_grpc.DraftingAsyncStub = draft_pb2_grpc.DraftingStub(counting)
            info = await self._get_info(stub)
            if info is None:
                raise MismatchError("the drafter's info cannot be decoded")
            self._handshake.check(info)
            fusion = await self._fusion(stub, info)
            call = cast(_Call, stub.Draft())
            stream = await self._open(call, info, fusion)
            self._post(Connected(stream))
            self._post(Loaded(stream, info.load))
            # Set after the engine knows the stream, so that a later request finds the drafter.
            self._note(generate_pb2.DRAFTER_STATE_READY, "")
            self._stream = stream
            try:
                await self._follow(call, stub, stream)
            except (Exception, asyncio.CancelledError) as error:
                # A stream that the engine fails ends as a cancelled call; a cancelled task must end.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                if isinstance(error, _ExpelledError) or _is_too_large(error):
                    stream.fail(_text(error), expel=True)
                # A drafter cannot leave before its last answers are judged.
                await stream.released.wait()
                if stream.failure is None:
                    raise
                raise (_ExpelledError if stream.is_expelled else TimeoutError)(stream.failure) from error

    async def _follow(self, call: _Call, stub: draft_pb2_grpc.DraftingAsyncStub, stream: Stream) -> None:
        """Take a stream's answers until it ends, which raises an error."""
        tasks = [asyncio.create_task(one) for one in (self._write(call, stream), self._ask_info(stub, stream))]
        try:
            while (answer := await _read(call)) is not None:
                self._take(stream, answer)
            is_draining = self.status.state == generate_pb2.DRAFTER_STATE_DRAINING
            raise TimeoutError("has drained") if is_draining else await _ending(call)
        finally:
            self._stream = None
            for task in tasks:
                task.cancel()
            call.cancel()
            self._post(Disconnected(stream))

    async def _get_info(self, stub: draft_pb2_grpc.DraftingAsyncStub) -> draft_pb2.GetDrafterInfoResponse | None:
        """Return the drafter's info; None if it cannot be decoded, as grpc reports it."""
        request = draft_pb2.GetDrafterInfoRequest()
        info: draft_pb2.GetDrafterInfoResponse | None = await stub.GetDrafterInfo(request, timeout=CONNECT_TIMEOUT_S)
        return info

    async def _fusion(
        self, stub: draft_pb2_grpc.DraftingAsyncStub, info: draft_pb2.GetDrafterInfoResponse
    ) -> FeatureFusion | None:
        """Return the head's fusion; None if fused features are not narrower, or fusion is disabled."""
        is_narrower = info.HasField("fusion") and info.fusion.width < info.features.width
        if not self._fuses_features or not is_narrower:
            return None
        described = info.fusion.SerializeToString(deterministic=True)
        key = (self._target.device, described, info.features.SerializeToString(deterministic=True))
        fusion = _fusions.get(key)
        if fusion is None:
            size = fusion_bytes(info.fusion, info.features)
            data = bytearray()
            request = draft_pb2.GetFeatureFusionRequest(head_fingerprint=info.head_fingerprint)
            chunks: Any = aiter(stub.GetFeatureFusion(request, timeout=FUSION_TIMEOUT_S))
            # Else the garbage collector would end an unfinished iterator, in any thread and at any depth of recursion.
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    data += b"" if chunk is None else chunk.data
                    if chunk is None or not chunk.data or len(data) > size:
                        break  # load_fusion raises
            fusion = await asyncio.to_thread(load_fusion, info.fusion, info.features, data, self._target.device)
            fusion = _fusions.setdefault(key, fusion)  # another link may have stored the fusion first
        return fusion

    async def _open(self, call: _Call, info: draft_pb2.GetDrafterInfoResponse, fusion: FeatureFusion | None) -> Stream:
        """Exchange the hellos, and return the stream with its shared memory."""
        hello = self._handshake.hello(info, fusion)
        sharing: asyncio.Task[SharedSegments] | None = None
        with contextlib.ExitStack() as stack:
            if self._carriers != [draft_pb2.CARRIER_BYTES]:
                try:
                    rendezvous = stack.enter_context(Rendezvous(self._rendezvous_dir))
                except OSError as error:  # for example, the directory does not exist
                    text = "drafter %s: tensors are sent in messages, because there is no rendezvous: %s"
                    logger.warning(text, self._address, error)
                else:
                    hello.rendezvous.CopyFrom(rendezvous.encode())
                    sharing = asyncio.create_task(in_thread("rendezvous", partial(self._share, rendezvous, info)))
            await call.write(draft_pb2.DraftRequest(hello=hello))
            answer = await asyncio.wait_for(_read(call), HELLO_TIMEOUT_S)
        if answer is None:
            raise await _ending(call)
        head = self._handshake.accept(answer, info, fusion)
        # The drafter agrees on both directions before it answers; without a rendezvous its wait has just ended.
        shared = SharedSegments() if sharing is None else await sharing
        # Release segments that the other side cannot use.
        outgoing = _agreed(shared.outgoing, answer.hello.carrier)
        incoming = _agreed(shared.incoming, answer.hello.logits_carrier)
        channel = shared.channel if answer.hello.direct else None
        if answer.hello.direct and channel is None:
            raise MismatchError("the drafter's hello says direct, but the drafter did not connect to the rendezvous")
        sender = TensorSender(self._target.device, outgoing)
        receiver = TensorReceiver(self._target.device, incoming)
        self.status.head_fingerprint = head.fingerprint
        self.status.feature_row_bytes = head.row_bytes
        self.status.features_are_fused = fusion is not None
        self.status.features_carrier = sender.carrier
        self.status.logits_carrier = receiver.carrier
        self.status.is_direct = channel is not None
        self._note_memory(answer.hello.info)
        logger.info(
            "drafter %s: connected, head %s; %s features by %s, draft logits by %s, messages %s",
            self._address,
            head.fingerprint,
            "fused" if fusion else "raw",
            carrier_name(sender.carrier),
            carrier_name(receiver.carrier),
            "direct" if channel else "by the stream",
        )
        return Stream(
            *(self.status, head, call.cancel, sender, receiver, self._show, self._traffic, channel),
            on_trial=self._on_trial,
        )

    @property
    def _largest_answer(self) -> int:
        """Return the maximum size of a drafter's message, a step's drafts with their logits."""
        largest = LEAST_ANSWER_BYTES + self._logits_bytes(self._max_sequences, self._target.vocab_size)
        return min(largest, MAX_MESSAGE_BYTES)

    def _logits_bytes(self, num_sequences: int, draft_vocab_size: int) -> int:
        """Return the bytes of the largest step's draft logits; 0 without draft logits."""
        config, logits = self._config, self._config.draft_logits
        row_bytes = {cfg.DENSE: 4 * draft_vocab_size, cfg.TOP_N: 8 * logits.n}.get(logits.form, 0)
        return num_sequences * config.num_speculative_tokens * row_bytes

    def _share(self, rendezvous: Rendezvous, info: draft_pb2.GetDrafterInfoResponse) -> SharedSegments:
        """Wait for the drafter at the rendezvous; runs in a separate thread."""
        step_bytes = self._logits_bytes(min(self._max_sequences, info.max_sequences), info.draft_vocab_size)
        # The ids of top_n are checked on the host.
        hosts = [carrier for carrier in self._carriers if carrier != draft_pb2.CARRIER_CUDA_IPC]
        return rendezvous.serve(
            self._carriers,
            self._carriers if self._config.draft_logits.form == cfg.DENSE else hosts,
            segment_bytes(step_bytes) if step_bytes else 0,
            self._target.device,
        )

    def _count(self, direction: Direction, message: Message, num_bytes: int) -> None:
        """Count a gRPC message."""
        self._traffic.count_message("grpc", direction, message, num_bytes)
        # Steps and answers also count in the status; hellos precede the stream.
        if self._stream is None or not isinstance(message, (draft_pb2.DraftRequest, draft_pb2.DraftResponse)):
            return
        if message.WhichOneof("message") not in ("draining", "keep_alive"):
            self._stream.count_bytes(direction, num_bytes)

    def _take(self, stream: Stream, answer: draft_pb2.DraftResponse) -> None:
        if answer.WhichOneof("message") == "draining":
            if self.status.state == generate_pb2.DRAFTER_STATE_DRAINING:
                raise _ExpelledError("sent Draining twice")
            self._note(generate_pb2.DRAFTER_STATE_DRAINING, "is draining: its sequences move to other drafters")
            self._post(Draining(stream))
            return
        # Check before the answer is queued for the engine, so that excess answers cannot fill the queue.
        if not stream.count_answer():
            raise _ExpelledError("answered more steps than it was sent")
        self._post(Answered(stream, answer.drafts))

    async def _ask_info(self, stub: draft_pb2_grpc.DraftingAsyncStub, stream: Stream) -> None:
        """Query the drafter's memory, and its load, which other verifiers change, while no answer reports it."""
        while True:
            received = self.status.received_message_bytes
            await asyncio.sleep(INFO_EVERY_S)
            try:
                info = await self._get_info(stub)
            except grpc.aio.AioRpcError as error:  # the stream detects a lost drafter
                if _is_too_large(error):
                    stream.fail(_text(error), expel=True)
                continue
            if info is None:
                continue
            self._note_memory(info)
            if self.status.received_message_bytes == received:
                self._post(Loaded(stream, info.load))

    def _note_memory(self, info: draft_pb2.GetDrafterInfoResponse) -> None:
        self.status.memory.CopyFrom(info.memory)
        self.status.memory.DiscardUnknownFields()  # clients see the known fields

    async def _write(self, call: _Call, stream: Stream) -> None:
        """Send the messages that the engine queues, and a KeepAlive while the queue is empty."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    entry = await stream.outbox.get()
            except TimeoutError:
                await call.write(draft_pb2.DraftRequest(keep_alive=draft_pb2.KeepAlive()))
                continue
            if entry is None:
                break
            await call.write(stream.encode(*entry))
        await call.done_writing()


class _ExpelledError(Exception):
    """The drafter violated the protocol."""


async def _read(call: _Call) -> draft_pb2.DraftResponse | None:
    """Return the next message of a stream, None at its end."""
    message = await call.read()
    if message is grpc.aio.EOF:
        return None
    if not isinstance(message, draft_pb2.DraftResponse):  # grpc returns None if the bytes cannot be decoded
        raise _ExpelledError("the answer cannot be decoded")
    return message


def _agreed(segment: Segment | None, carrier: draft_pb2.Carrier) -> Segment | None:
    return segment if segment is not None and segment.carrier == carrier else None


async def _ending(call: _Call) -> Exception:
    """Return why a stream has ended or cannot be read."""
    call.cancel()
    status = await call.code()
    details = await call.details() or "no details"
    return TimeoutError(f"{status.name}: {details}")


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says that verifier and drafter do not match."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() == grpc.StatusCode.FAILED_PRECONDITION
    return isinstance(error, (MismatchError, InvalidArgumentError))


def _is_too_large(error: BaseException) -> bool:
    """Return whether a drafter's message was too large to receive; gRPC says so only in the status text."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
        return False
    # "SERVER: Received ..." means that the drafter rejected a message of the verifier.
    causes = ("CLIENT: Received message larger than max", "Decompressed message larger than max")
    return any(cause in (error.details() or "") for cause in causes)


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
