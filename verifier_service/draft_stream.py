"""One open stream to a drafter, and what happens on it, as the engine's thread sees them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError

from draftwire.carriers import Lane, Outgoing, TensorReceiver, TensorSender, VerifierBoard
from draftwire.encoding import Encoded, encode_step
from draftwire.fusion import FeatureFusion
from draftwire.traffic import Direction, Traffic
from draftwire.v1 import draft_pb2, generate_pb2
from verifier_service.features import FeatureKind


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


LinkEvent = Connected | Disconnected | Answered | Draining | Loaded


class Stream:
    """One open stream, as the engine's thread sees it, which calls all methods that do not say otherwise.

    Messages go over the lane, where there is one and they fit, without another thread; see `Rendezvous` in draft.proto.

    Attributes
    ----------
    sender
        Gives room for the features of a step.
    receiver
        Takes the draft logits of an answer.
    board
        Where drawn tokens are written for the drafter; None where it has none.
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
        traffic: Traffic,
        lane: Lane | None = None,
        board: VerifierBoard | None = None,
        *,
        on_trial: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`status` is the drafter's, in which bytes are counted; `traffic` counts those of all that go over lanes. The
        `loop` is by default the one that runs."""
        self.address = status.address
        self.head = head
        self.sender = sender
        self.receiver = receiver
        self.lane = lane
        self.board = board
        # None: nothing more is sent.
        self.outbox: asyncio.Queue[tuple[draft_pb2.DraftStep, Outgoing | None] | None] = asyncio.Queue()
        self.on_trial = on_trial
        self.failure: str | None = None
        self.is_expelled = False
        self._num_unanswered = 0  # steps that were sent
        self._status = status
        self._cancel = cancel
        self._report = report
        self._traffic = traffic
        self._loop = loop or asyncio.get_running_loop()
        self._lock = threading.Lock()  # of the counts
        self._last_queued = 0  # step
        self._last_answered = 0
        self._uncounted: list[tuple[draft_pb2.DraftResponse, int]] = []  # read from the lane, with their bytes

    def send(self, step: draft_pb2.DraftStep, features: Outgoing | None = None) -> None:
        """Sends a step and the features that go with it; never waits for the drafter."""
        with self._lock:
            self._num_unanswered += 1
        if self.is_direct_next and (features is None or features.carrier != draft_pb2.CARRIER_BYTES):
            request, features = self.encode(step, features), None
            if self.lane is not None and self.lane.send(request.data):
                self._traffic.count_message("direct", "sent", request.message, len(request.data))
                self.count_bytes("sent", len(request.data))
                return
        self._last_queued = step.step_id
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, (step, features))

    def report(self, state: generate_pb2.DrafterState) -> None:
        """Has the drafter shown in that state for as long as the stream is open; from any thread."""
        self._loop.call_soon_threadsafe(self._report, self, state)

    def end(self) -> None:
        """Sends nothing more, upon which the drafter ends the stream."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, None)

    def foretell(self, upcoming: draft_pb2.UpcomingStep) -> None:
        """Tells the drafter what a step will be, if the lane takes it."""
        request = draft_pb2.DraftRequest(upcoming=upcoming)
        message = request.SerializeToString()
        if self.lane is not None and self.lane.send(message):
            self._traffic.count_message("direct", "sent", request, len(message))
            self.count_bytes("sent", len(message))

    @property
    def is_direct_next(self) -> bool:
        """Whether the next step may go over the lane: it must not overtake those that were sent over the stream."""
        return self.lane is not None and self._last_answered >= self._last_queued

    def encode(self, step: draft_pb2.DraftStep, features: Outgoing | None) -> Encoded:
        """The message of a step and its features, for which it waits."""
        elements = None if features is None else features.finish(step.features)
        step.logits_read = self.receiver.generation_read
        return encode_step(step, elements)

    def count_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Counts the message of a step or of an answer in the drafter's status; from any thread."""
        with self._lock:
            if direction == "sent":
                self._status.sent_message_bytes += num_bytes
            else:
                self._status.received_message_bytes += num_bytes

    def count_answer(self) -> bool:
        """Counts an answer; whether there was a step for it. From any thread."""
        with self._lock:
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
            for message, received in self.lane.receive_timed():
                answer = draft_pb2.DraftResponse.FromString(message)
                events.append(Answered(self, answer.drafts, received))
                self._uncounted.append((answer, len(message)))
                if not self.count_answer():
                    self.fail("answered more steps than it was sent", expel=True)
                    return None
        except ConnectionError:
            return None
        except DecodeError:
            self.fail("wrong answer: not a DraftResponse", expel=True)
            return None
        return events

    def count_received(self) -> None:
        """Counts the messages that `read_lane` has read; later, because a step may begin with what they bring."""
        for answer, num_bytes in self._uncounted:
            self._traffic.count_message("direct", "received", answer, num_bytes)
            self.count_bytes("received", num_bytes)
        self._uncounted.clear()

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """Ends the stream at once; from any thread. An expelled drafter is left alone for a while."""
        if self.failure is None:
            self.failure, self.is_expelled = reason, expel
            self._loop.call_soon_threadsafe(self._cancel)
