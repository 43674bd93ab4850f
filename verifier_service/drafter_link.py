"""The stream to one drafter: connection, handshake, reconnection. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import grpc
import torch
from google.protobuf.message import DecodeError

from draftwire import config as cfg
from draftwire.carriers import (
    ALL_CARRIERS,
    Lane,
    Outgoing,
    Rendezvous,
    Segment,
    SharedSegments,
    TensorReceiver,
    TensorSender,
    carrier_name,
    offered_carriers,
    segment_bytes,
)
from draftwire.errors import InvalidArgumentError, MismatchError
from draftwire.fusion import FeatureFusion, fusion_bytes, load_fusion
from draftwire.security import LOOPBACK, ClientSecurity, open_async_channel
from draftwire.tensors import DTYPES, WIRE_DTYPES, decode_tensor
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2
from draftwire.version import PROTOCOL_VERSION
from draftwire.wire import MAX_MESSAGE_BYTES, receiving_at_most
from draftwire_kernels import NOISE_VERSION
from verifier_service.features import FeatureKind
from verifier_service.target import Target

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 5.0
# After an expulsion; each time twice as long, until a stream has lasted longer than the longest.
EXPELLED_RETRY_S = (60.0, 600.0)
# Feature rows of more states than this are no head's.
MAX_FEATURE_LAYERS = 16
FEATURE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSION_TIMEOUT_S = 60.0
# A drafter that answers nothing, for nothing is asked, is asked for its load so often.
LOAD_EVERY_S = 1.0
# A hello with the ids of the draft vocabulary, a piece of a fusion, an answer without logits.
LEAST_ANSWER_BYTES = 8 << 20
# By description, with the digest of weights that were really received: heads that are alike share them.
_fusions: WeakValueDictionary[tuple[torch.device, bytes, bytes], FeatureFusion] = WeakValueDictionary()


@dataclass(frozen=True)
class HeadInfo:
    """What the verifier needs to know of a connected drafter's head."""

    fingerprint: str
    layers: tuple[int, ...]
    dtype: torch.dtype  # of the features on the wire
    draft_vocab_size: int
    draft_token_ids: torch.Tensor | None  # int64 [draft_vocab_size], None when the vocabularies are equal
    row_bytes: int  # of a feature row on the wire
    max_drafts: int
    max_sequences: int
    max_model_len: int
    fusion: FeatureFusion | None = None  # applied before features are sent; None sends them as they are
    fusion_digest: str = ""

    @property
    def kind(self) -> FeatureKind:
        """What is sent, and must be given to no other head when it is fused."""
        return FeatureKind(self.layers, f"{self.fingerprint} {self.fusion_digest}" if self.fusion else "")

    @property
    def width(self) -> int:
        """Elements of a feature row on the wire."""
        return self.row_bytes // self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Connected:
    """Event: a stream is open. Each stream is a new `Stream` object."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Disconnected:
    """Event: a stream has ended."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Answered:
    """Event: a drafter has answered a step."""

    stream: Stream
    drafts: draft_pb2.Drafts
    received: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class Draining:
    """Event: a drafter is about to end, and answers what it was sent."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Loaded:
    """Event: a drafter has told its load, as it also does with every answer."""

    stream: Stream
    load: draft_pb2.DrafterLoad


_Call = grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]
LinkEvent = Connected | Disconnected | Answered | Draining | Loaded


class Stream:
    """One open stream, as the engine's thread sees it, which calls all methods but `count_sent`.

    Messages go over the lane, where there is one and they fit, without another thread; see `Rendezvous` in draft.proto.

    Attributes
    ----------
    sender
        Gives room for the features of a step.
    receiver
        Takes the draft logits of an answer.
    on_trial
        Whether the drafter was expelled on the stream before.
    """

    def __init__(
        self,
        status: generate_pb2.DrafterStatus,
        head: HeadInfo,
        cancel: Callable[[], object],
        sender: TensorSender,
        receiver: TensorReceiver,
        report: Callable[[Stream, generate_pb2.DrafterState], None],
        lane: Lane | None = None,
        *,
        on_trial: bool = False,
    ) -> None:
        """`status` is the drafter's, in which bytes are counted."""
        self.address = status.address
        self.head = head
        self.sender = sender
        self.receiver = receiver
        self.lane = lane
        # None: nothing more is sent.
        self.outbox: asyncio.Queue[tuple[draft_pb2.DraftStep, Outgoing | None] | None] = asyncio.Queue()
        self.on_trial = on_trial
        self.failure: str | None = None
        self.is_expelled = False
        self._num_unanswered = 0  # steps that were sent
        self._status = status
        self._cancel = cancel
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of the counts
        self._last_queued = 0  # step
        self._last_answered = 0

    def send(self, step: draft_pb2.DraftStep, features: Outgoing | None = None) -> None:
        """Sends a step and the features that go with it; never waits for the drafter."""
        if self._is_direct_next() and (features is None or features.carrier != draft_pb2.CARRIER_BYTES):
            if features is not None:
                features.finish(step.features)
                features = None
            message = self.request(step).SerializeToString()
            if self.lane is not None and self.lane.send(message):
                self.count_sent(len(message))
                return
        self._last_queued = step.step_id
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, (step, features))

    def report(self, state: generate_pb2.DrafterState) -> None:
        """Has the drafter shown in that state for as long as the stream is open; from any thread."""
        self._loop.call_soon_threadsafe(self._report, self, state)

    def end(self) -> None:
        """Sends nothing more, upon which the drafter ends the stream."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, None)

    def _is_direct_next(self) -> bool:
        """Steps must not overtake those that were sent over the stream."""
        return self.lane is not None and self._last_answered >= self._last_queued

    def request(self, step: draft_pb2.DraftStep) -> draft_pb2.DraftRequest:
        """The message of a step."""
        step.logits_read = self.receiver.generation_read
        return draft_pb2.DraftRequest(step=step)

    def count_sent(self, num_bytes: int) -> None:
        """Counts the message of a step; from any thread."""
        with self._lock:
            self._status.sent_message_bytes += num_bytes
            self._num_unanswered += 1

    def count_answer(self, num_bytes: int) -> bool:
        """Counts an answer's message; whether there was a step to answer. From any thread."""
        with self._lock:
            self._status.received_message_bytes += num_bytes
            self._num_unanswered -= 1
            return self._num_unanswered >= 0

    def take(self, drafts: draft_pb2.Drafts) -> None:
        """Takes note of an answer.

        Raises
        ------
        InvalidArgumentError
            When it has read features that were not sent.
        """
        self._last_answered = drafts.step_id
        self.sender.release(drafts.features_read, "drafts.features_read")

    def read_lane(self) -> list[LinkEvent] | None:
        """The answers that have come over the lane; None when no more will."""
        if self.failure is not None or self.lane is None:
            return None
        events: list[LinkEvent] = []
        try:
            for message in self.lane.receive():
                events.append(Answered(self, draft_pb2.DraftResponse.FromString(message).drafts))
                if not self.count_answer(len(message)):
                    self.fail("answered more steps than it was sent", expel=True)
                    return None
        except ConnectionError:
            return None
        except DecodeError:
            self.fail("wrong answer: not a DraftResponse", expel=True)
            return None
        return events

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """Ends the stream at once; from any thread. An expelled drafter is left alone for a while."""
        if self.failure is None:
            self.failure, self.is_expelled = reason, expel
            self._loop.call_soon_threadsafe(self._cancel)


_DETAILS = {
    generate_pb2.DRAFTER_STATE_SLOW: "is late too often: left alone for a while",
    generate_pb2.DRAFTER_STATE_PROBING: "is on trial with one sequence",
}


class DrafterLink:
    """Keeps a stream to one drafter open for as long as the verifier runs."""

    def __init__(
        self,
        address: str,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        max_sequences: int,
        post: Callable[[LinkEvent], None],
        security: ClientSecurity = LOOPBACK,
        host: str | None = None,
        carriers: Sequence[draft_pb2.Carrier] = ALL_CARRIERS,
        *,
        fuses_features: bool = True,
    ) -> None:
        """`host` is the name that the drafter's certificate must have; by default that of the address. `carriers` are
        those that the operator allows, best first. With `fuses_features` they are fused where the head lets them be.
        """
        self.status = generate_pb2.DrafterStatus(address=address, state=generate_pb2.DRAFTER_STATE_CONNECTING)
        self._address = address
        self._target = target
        self._config = config
        self._max_sequences = max_sequences
        self._post = post
        self._security = security
        self._host = host
        self._fuses_features = fuses_features
        self._on_trial = False
        self._stream: Stream | None = None
        self._carriers = offered_carriers(carriers, target.device)

    async def run(self) -> None:
        """Connects, serves and reconnects until cancelled."""
        delay, expelled_delay = BACKOFF_S[0], EXPELLED_RETRY_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._serve()
            except _ExpelledError as error:
                self._note(generate_pb2.DRAFTER_STATE_EXPELLED, f"expelled: {error}")
                self._on_trial = True
                if time.monotonic() - began > EXPELLED_RETRY_S[1]:
                    expelled_delay = EXPELLED_RETRY_S[0]
                delay, expelled_delay = expelled_delay, min(2 * expelled_delay, EXPELLED_RETRY_S[1])
            except Exception as error:
                if _is_refusal(error):
                    self._note(generate_pb2.DRAFTER_STATE_REFUSED, _text(error))
                    delay = REFUSED_RETRY_S
                else:
                    if not isinstance(error, (grpc.aio.AioRpcError, TimeoutError)):
                        logger.exception("drafter %s: the stream failed", self._address)
                    self._note(generate_pb2.DRAFTER_STATE_CONNECTING, _text(error))
                    has_served = time.monotonic() - began > CONNECT_TIMEOUT_S
                    delay = BACKOFF_S[0] if has_served else min(2 * delay, BACKOFF_S[1])
            await asyncio.sleep(delay * random.uniform(0.5, 1))

    def _note(self, state: generate_pb2.DrafterState, detail: str) -> None:
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
            stub = draft_pb2_grpc.DraftingStub(channel)
            info = await stub.GetDrafterInfo(draft_pb2.GetDrafterInfoRequest(), timeout=CONNECT_TIMEOUT_S)
            if info is None:  # what grpc gives for bytes that are no message
                raise MismatchError("the drafter's description of itself cannot be decoded")
            self._check(info)
            fusion = await self._fusion(stub, info)
            call = stub.Draft()
            stream = await self._open(call, info, fusion)
            self._post(Connected(stream))
            self._post(Loaded(stream, info.load))
            # Shown once the engine has been told, so that a request that comes after it finds the drafter.
            self._note(generate_pb2.DRAFTER_STATE_READY, "")
            self._stream = stream
            tasks = [asyncio.create_task(one) for one in (self._write(call, stream), self._ask_load(stub, stream))]
            try:
                while (answer := await _read(call)) is not None:
                    self._take(stream, answer)
                is_draining = self.status.state == generate_pb2.DRAFTER_STATE_DRAINING
                raise TimeoutError("it has drained") if is_draining else await _ending(call)
            except (asyncio.CancelledError, grpc.aio.AioRpcError) as error:
                # A stream that the engine fails ends as a cancelled call; a task that is cancelled is to end.
                task = asyncio.current_task()
                if stream.failure is None or (task is not None and task.cancelling()):
                    raise
                kind = _ExpelledError if stream.is_expelled else TimeoutError
                raise kind(stream.failure) from error
            finally:
                self._stream = None
                for task in tasks:
                    task.cancel()
                call.cancel()
                self._post(Disconnected(stream))

    async def _fusion(
        self, stub: draft_pb2_grpc.DraftingAsyncStub, info: draft_pb2.GetDrafterInfoResponse
    ) -> FeatureFusion | None:
        """The head's fusion, unless features are sent as they are: where fused ones are no narrower, or it is off."""
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
            async for chunk in stub.GetFeatureFusion(request, timeout=FUSION_TIMEOUT_S):
                data += b"" if chunk is None else chunk.data
                if chunk is None or not chunk.data or len(data) > size:
                    break  # told below
            fusion = await asyncio.to_thread(load_fusion, info.fusion, info.features, data, self._target.device)
            fusion = _fusions.setdefault(key, fusion)  # another link may have been faster
        return fusion

    async def _open(
        self, call: _Call, info: draft_pb2.GetDrafterInfoResponse, fusion: FeatureFusion | None
    ) -> Stream:
        """The stream after both hellos, with the memory that both sides share."""
        hello = self._hello(info, fusion)
        sharing: asyncio.Future[SharedSegments] | None = None
        with contextlib.ExitStack() as stack:
            if self._carriers != [draft_pb2.CARRIER_BYTES]:
                rendezvous = stack.enter_context(Rendezvous())
                hello.rendezvous.CopyFrom(rendezvous.encode())
                sharing = asyncio.ensure_future(asyncio.to_thread(self._share, rendezvous, info))
            await call.write(draft_pb2.DraftRequest(hello=hello))
            answer = await asyncio.wait_for(_read(call), CONNECT_TIMEOUT_S)
        if answer is None:
            raise await _ending(call)
        head = self._accept(answer, info, fusion)
        # The drafter has settled both directions before it answered; without a rendezvous its wait has just ended.
        shared = SharedSegments() if sharing is None else await sharing
        # What the other side could not make use of is given up again.
        outgoing = _agreed(shared.outgoing, answer.hello.carrier)
        incoming = _agreed(shared.incoming, answer.hello.logits_carrier)
        lane = shared.lane if answer.hello.direct else None
        if answer.hello.direct and lane is None:
            raise MismatchError("the drafter's hello says direct, but it has not come to the rendezvous")
        sender = TensorSender(self._target.device, outgoing)
        receiver = TensorReceiver(self._target.device, incoming)
        self.status.head_fingerprint = head.fingerprint
        self.status.feature_row_bytes = head.row_bytes
        self.status.features_are_fused = fusion is not None
        self.status.features_carrier = sender.carrier
        self.status.logits_carrier = receiver.carrier
        self.status.is_direct = lane is not None
        logger.info(
            "drafter %s: connected, head %s; %s features by %s, draft logits by %s, messages %s",
            self._address,
            head.fingerprint,
            "fused" if fusion else "raw",
            carrier_name(sender.carrier),
            carrier_name(receiver.carrier),
            "direct" if lane else "by the stream",
        )
        return Stream(
            self.status, head, call.cancel, sender, receiver, self._show, lane, on_trial=self._on_trial
        )

    @property
    def _largest_answer(self) -> int:
        """Bytes of the largest message that a drafter may send: a step's drafts with their logits."""
        config, logits = self._config, self._config.draft_logits
        row_bytes = {cfg.DENSE: 4 * self._target.vocab_size, cfg.TOP_N: 8 * logits.n}.get(logits.form, 0)
        largest = LEAST_ANSWER_BYTES + self._max_sequences * config.num_speculative_tokens * row_bytes
        return min(largest, MAX_MESSAGE_BYTES)

    def _share(self, rendezvous: Rendezvous, info: draft_pb2.GetDrafterInfoResponse) -> SharedSegments:
        """Waits for the drafter at the rendezvous; in a thread of its own."""
        config, logits = self._config, self._config.draft_logits
        row_bytes = {cfg.DENSE: 4 * info.draft_vocab_size, cfg.TOP_N: 8 * logits.n}.get(logits.form, 0)
        step_bytes = min(self._max_sequences, info.max_sequences) * config.num_speculative_tokens * row_bytes
        # The ids of top_n are checked on the host.
        hosts = [carrier for carrier in self._carriers if carrier != draft_pb2.CARRIER_CUDA_IPC]
        return rendezvous.serve(
            self._carriers,
            self._carriers if logits.form == cfg.DENSE else hosts,
            segment_bytes(step_bytes) if step_bytes else 0,
            self._target.device,
        )

    def _take(self, stream: Stream, answer: draft_pb2.DraftResponse) -> None:
        if answer.WhichOneof("message") == "draining":
            if self.status.state == generate_pb2.DRAFTER_STATE_DRAINING:
                raise _ExpelledError("said twice that it drains")
            self._note(generate_pb2.DRAFTER_STATE_DRAINING, "is draining: its sequences move")
            self._post(Draining(stream))
            return
        if not stream.count_answer(answer.ByteSize()):  # before it queues up where the engine cannot tell yet
            raise _ExpelledError("answered more steps than it was sent")
        self._post(Answered(stream, answer.drafts))

    async def _ask_load(self, stub: draft_pb2_grpc.DraftingAsyncStub, stream: Stream) -> None:
        """Posts the load, which other verifiers make too, while no answers tell it."""
        while True:
            received = self.status.received_message_bytes
            await asyncio.sleep(LOAD_EVERY_S)
            if self.status.received_message_bytes == received:
                with contextlib.suppress(grpc.aio.AioRpcError):  # whether the drafter lives, the stream tells
                    info = await stub.GetDrafterInfo(draft_pb2.GetDrafterInfoRequest(), timeout=CONNECT_TIMEOUT_S)
                    if info is not None:  # what grpc gives for bytes that are no message
                        self._post(Loaded(stream, info.load))

    async def _write(self, call: _Call, stream: Stream) -> None:
        """Sends what the engine queues for the stream."""
        while (entry := await stream.outbox.get()) is not None:
            step, features = entry
            if features is not None:
                features.finish(step.features)
            request = stream.request(step)
            stream.count_sent(request.ByteSize())
            await call.write(request)
        await call.done_writing()

    def _accept(
        self,
        answer: draft_pb2.DraftResponse,
        info: draft_pb2.GetDrafterInfoResponse,
        fusion: FeatureFusion | None,
    ) -> HeadInfo:
        """The head of a drafter's hello, checked again: it may have changed since the info call."""
        hello = answer.hello
        if answer.WhichOneof("message") != "hello" or hello.carrier not in self._carriers:
            offered = ", ".join(carrier_name(carrier) for carrier in self._carriers)
            raise MismatchError(f"the drafter's first message must be a hello with one of the carriers {offered}")
        self._check(hello.info)
        if fusion is not None and (hello.info.head_fingerprint, hello.info.fusion) != (
            info.head_fingerprint,
            info.fusion,
        ):
            raise MismatchError(f"the head has changed: {info.head_fingerprint} to {hello.info.head_fingerprint}")
        return _head_info(hello, self._target.vocab_size, fusion)

    def _check(self, info: draft_pb2.GetDrafterInfoResponse) -> None:
        """Refuses a drafter that cannot serve this target, with both sides' values."""
        config = self._config
        pairs = [
            ("protocol_version", PROTOCOL_VERSION, info.protocol_version),
            ("vocab_size", self._target.vocab_size, info.target_vocab_size),
            ("hidden_size", self._target.hidden_size, info.target_hidden_size),
        ]
        if config.draft_sample_method == cfg.GUMBEL:
            pairs.append(("noise_version", NOISE_VERSION, info.noise_version))
        if info.target_num_layers:
            pairs.append(("num_layers", self._target.num_layers, info.target_num_layers))
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise MismatchError(f"{name} does not match: verifier {ours}, drafter {theirs}")
        if config.HasField("method") and config.method != info.method:
            raise MismatchError(f"method does not match: verifier {config.method!r}, drafter {info.method!r}")
        self._check_features(info.features)
        if config.num_speculative_tokens > info.max_num_speculative_tokens:
            raise MismatchError(
                f"num_speculative_tokens does not fit: verifier {config.num_speculative_tokens}, "
                f"drafter at most {info.max_num_speculative_tokens}"
            )
        logits = config.draft_logits
        if info.draft_vocab_size > self._target.vocab_size:
            raise MismatchError(
                f"draft_vocab_size does not fit: verifier at most {self._target.vocab_size}, "
                f"drafter {info.draft_vocab_size}"
            )
        if logits.form not in info.draft_logits_forms or logits.n > info.draft_vocab_size:
            raise MismatchError(
                f"draft_logits do not fit: verifier {cfg.draft_logits_text(logits)}, "
                f"drafter forms {list(info.draft_logits_forms)} of {info.draft_vocab_size} logits"
            )

    def _check_features(self, features: draft_pb2.FeatureSpec) -> None:
        layers = list(features.layers)
        is_known = len(layers) <= MAX_FEATURE_LAYERS and layers == sorted(set(layers))
        if not layers or not is_known or layers[-1] > self._target.num_layers:
            raise MismatchError(
                f"features do not fit: drafter layers {layers[:MAX_FEATURE_LAYERS]}, "
                f"verifier different ones of 0 to {self._target.num_layers}, ascending"
            )
        width = len(layers) * self._target.hidden_size
        if features.width != width or DTYPES.get(features.dtype) not in FEATURE_DTYPES:
            raise MismatchError(
                f"features do not fit: drafter width {features.width} of dtype {features.dtype}, "
                f"verifier width {width} of dtypes {[WIRE_DTYPES[dtype] for dtype in FEATURE_DTYPES]}"
            )

    def _hello(
        self, info: draft_pb2.GetDrafterInfoResponse, fusion: FeatureFusion | None
    ) -> draft_pb2.VerifierHello:
        target = self._target
        features = draft_pb2.FeatureSpec(
            layers=info.features.layers,
            width=len(info.features.layers) * target.hidden_size,
            dtype=info.features.dtype,
        )
        if fusion is not None:
            features.width, features.fused_for = info.fusion.width, info.head_fingerprint
        return draft_pb2.VerifierHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            verifier=Path(target.name).name.encode()[:128].decode(errors="ignore"),
            target=draft_pb2.TargetSpec(
                name=target.name,
                fingerprint=target.fingerprint,
                vocab_size=target.vocab_size,
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                max_model_len=target.max_model_len,
            ),
            features=features,
            speculative_config=self._config,
            max_sequences=min(self._max_sequences, info.max_sequences),
            carriers=self._carriers,
        )


class _ExpelledError(Exception):
    """A drafter answered what it must not."""


async def _read(call: _Call) -> draft_pb2.DraftResponse | None:
    """The next message of a stream, None at its end."""
    message = await call.read()
    if message is grpc.aio.EOF:
        return None
    if not isinstance(message, draft_pb2.DraftResponse):  # None is what grpc gives for bytes that are no message
        raise _ExpelledError("its answer cannot be decoded")
    return message


def _agreed(segment: Segment | None, carrier: draft_pb2.Carrier) -> Segment | None:
    return segment if segment is not None and segment.carrier == carrier else None


async def _ending(call: _Call) -> Exception:
    """Why a stream has ended, or gives what cannot be read."""
    call.cancel()
    status = await call.code()
    details = await call.details() or "no details"
    return TimeoutError(f"{status.name}: {details}")


def _head_info(hello: draft_pb2.DrafterHello, vocab_size: int, fusion: FeatureFusion | None) -> HeadInfo:
    info = hello.info
    width = info.features.width if fusion is None else info.fusion.width
    token_ids = None
    if hello.HasField("draft_token_ids"):
        shape = (info.draft_vocab_size,)
        token_ids = decode_tensor(hello.draft_token_ids, "draft_token_ids", torch.int32, shape).to(torch.int64)
        is_known = len(token_ids) and int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size
        # Two columns of one token would make its q another than the one that drafts are drawn from.
        if not is_known or len(token_ids.unique()) < len(token_ids):
            raise MismatchError(f"draft_token_ids must be in [0, {vocab_size}), at least one and all different")
    elif info.draft_vocab_size != vocab_size:
        raise MismatchError(
            f"draft_token_ids are missing: drafter vocabulary {info.draft_vocab_size}, {vocab_size} here"
        )
    return HeadInfo(
        fingerprint=info.head_fingerprint,
        layers=tuple(info.features.layers),
        dtype=DTYPES[info.features.dtype],
        draft_vocab_size=info.draft_vocab_size,
        draft_token_ids=token_ids,
        row_bytes=width * DTYPES[info.features.dtype].itemsize,
        max_drafts=info.max_num_speculative_tokens,
        max_sequences=info.max_sequences,
        max_model_len=info.max_model_len,
        fusion=fusion,
        fusion_digest=info.fusion.digest,
    )


def _is_refusal(error: Exception) -> bool:
    """Whether one side finds that the two do not fit."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() == grpc.StatusCode.FAILED_PRECONDITION
    return isinstance(error, (MismatchError, InvalidArgumentError))


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
