"""One open stream to a drafter, and what happens on it, as the engine's thread sees them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from google.protobuf.message import DecodeError

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.fusion import FeatureFusion
from draftwire.transport import Body, Channel, Outgoing, TensorReceiver, TensorSender
from draftwire.transport.encoding import Encoded, encode_step
from draftwire.transport.traffic import Direction, Traffic
from draftwire.v1 import draft_pb2, generate_pb2
from verifier_service.drafters.features import FeatureKind


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
    confidences: bool = False  # whether each draft comes with its confidence

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


StepMessage = draft_pb2.DraftStep | draft_pb2.Commit
LinkEvent = Connected | Disconnected | Answered | Draining | Loaded


class AnnouncedStep(NamedTuple):
    """A step that was announced to a drafter."""

    announced_id: int
    num_drafts: int  # of each sequence
    num_sequences: int
    confidences: bool  # whether each early draft comes with its confidence

    @property
    def early_shape(self) -> tuple[int, ...]:
        """Shape of the early drafts; see `EarlyDrafts` in draft.proto."""
        return (self.num_sequences, self.num_drafts, 2) if self.confidences else (self.num_sequences, self.num_drafts)


class Stream:
    """One open stream, as the engine's thread sees it, which calls all methods that do not say otherwise.

    Messages go through the channel, where there is one and they fit, without another thread; see `Rendezvous` in
    draft.proto.

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
        traffic: Traffic,
        channel: Channel | None = None,
        *,
        on_trial: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`status` is the drafter's, in which bytes are counted; `traffic` counts those of all channels. The
        `loop` is by default the one that runs."""
        self.address = status.address
        self.head = head
        self.sender = sender
        self.receiver = receiver
        # None: nothing more is sent.
        self.outbox: asyncio.Queue[tuple[StepMessage, Outgoing | None] | None] = asyncio.Queue()
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
        self._channel = channel
        self._last_announced = 0  # id of a step
        self._resolved = (0, 0)  # the last step that was sent, and up to which announced ones are resolved by it
        self._early: tuple[int, Body] | None = None  # of the announced step that the drafter has begun last
        self._uncounted: list[tuple[draft_pb2.DraftResponse, int]] = []  # read from the channel, with their bytes

    def send(self, step: StepMessage, features: Outgoing | None = None) -> None:
        """Sends a step and the features that go with it; never waits for the drafter."""
        with self._lock:
            self._num_unanswered += 1
        self._resolved = step.step_id, step.announced_id if isinstance(step, draft_pb2.Commit) else step.replaces
        is_shared = features is None or features.carrier != draft_pb2.CARRIER_BYTES
        if self.is_direct_next and is_shared:
            request, features = self.encode(step, features), None
            if self._send_direct(request):
                return
        self._last_queued = step.step_id
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, (step, features))

    def _send_direct(self, request: Encoded, numbers: torch.Tensor | None = None) -> bool:
        """Sends a message through the channel; False when it does not fit."""
        if self._channel is None or not self._channel.send(request.data, numbers):
            return False
        self._traffic.count_message("direct", "sent", request.message, len(request.data))
        self.count_bytes("sent", len(request.data))
        return True

    def report(self, state: generate_pb2.DrafterState) -> None:
        """Has the drafter shown in that state for as long as the stream is open; from any thread."""
        self._loop.call_soon_threadsafe(self._report, self, state)

    def end(self) -> None:
        """Sends nothing more, upon which the drafter ends the stream."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, None)

    @property
    def may_announce(self) -> bool:
        """Whether the next step may be announced."""
        return self._channel is not None and self._channel.takes_numbers and self.is_direct_next

    def announce(
        self, message: draft_pb2.Announce, numbers: torch.Tensor, features: Outgoing
    ) -> AnnouncedStep | None:
        """Announces a step, and has its `numbers` written for the drafter when the current stream comes to it.

        Returns
        -------
        None when it was not announced, and the features are still the caller's.
        """
        features.announce(message.features)
        request = draft_pb2.DraftRequest(announce=message)
        if not self._send_direct(Encoded(request, request.SerializeToString()), numbers):
            features.take_back()
            return None
        self._last_announced = message.announced_id
        return AnnouncedStep(
            message.announced_id, message.num_drafts, len(message.sequence_ids), self.head.confidences
        )

    def has_early_drafts(self, announced: AnnouncedStep) -> bool:
        """Whether the drafts of an announced step have been written."""
        if self._early is None:
            return False
        announced_id, body = self._early
        num_numbers = math.prod(announced.early_shape)
        return announced_id == announced.announced_id and body.num_numbers == num_numbers and body.is_written

    def read_early_drafts(self, announced: AnnouncedStep) -> np.ndarray:
        """A copy of them, int32 of `early_shape`, which is not checked."""
        assert self._early is not None
        return self._early[1].read(announced.early_shape)

    def _take_early(self, early: draft_pb2.EarlyDrafts, body: Body | None) -> None:
        """The drafter has begun an announced step; it gives up what it had begun before."""
        if body is None or not 1 <= early.announced_id <= self._last_announced:
            raise InvalidArgumentError("early.announced_id", early.announced_id, "must be announced, and have a body")
        if self._early is not None:
            self._early[1].release()
        self._early = early.announced_id, body

    @property
    def is_direct_next(self) -> bool:
        """Whether the next step may go through the channel: it must not overtake those sent over the stream."""
        return self._channel is not None and self._last_answered >= self._last_queued

    def encode(self, step: StepMessage, features: Outgoing | None) -> Encoded:
        """The message of a step and its features, for which it waits."""
        step.logits_read = self.receiver.generation_read
        if isinstance(step, draft_pb2.Commit):
            if features is not None:
                features.wait()
            request = draft_pb2.DraftRequest(commit=step)
            return Encoded(request, request.SerializeToString())
        return encode_step(step, None if features is None else features.finish(step.features))

    @property
    def is_direct(self) -> bool:
        """Whether messages may come without the stream's help, when `fileno` is readable."""
        return self._channel is not None

    def fileno(self) -> int:
        """Of what is readable when messages have come directly."""
        assert self._channel is not None
        return self._channel.fileno()

    def close_direct(self) -> None:
        """Reads no more messages that come directly."""
        if self._channel is not None:
            self._channel.close()

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
        step_id, announced_id = self._resolved
        if self._early is not None and step_id <= drafts.step_id and self._early[0] <= announced_id:
            self._early[1].release()  # else all that comes later would lie behind it
            self._early = None
        self.sender.release(drafts.features_read, "drafts.features_read")

    def read_direct(self) -> list[LinkEvent] | None:
        """The answers that have come through the channel; None when no more will."""
        if self.failure is not None or self._channel is None:
            return None
        events: list[LinkEvent] = []
        try:
            for message, received, body in self._channel.receive():
                answer = draft_pb2.DraftResponse.FromString(message)
                self._uncounted.append((answer, len(message)))
                if answer.WhichOneof("message") == "early":
                    self._take_early(answer.early, body)
                    continue
                if body is not None:
                    body.release()
                events.append(Answered(self, answer.drafts, received))
                if not self.count_answer():
                    self.fail("answered more steps than it was sent", expel=True)
                    return None
        except ConnectionError:
            return None
        except (DecodeError, InvalidArgumentError) as error:
            text = "not a DraftResponse" if isinstance(error, DecodeError) else str(error)
            self.fail(f"wrong answer: {text}", expel=True)
            return None
        return events

    def count_received(self) -> None:
        """Counts the messages that `read_direct` has read; later, because a step may begin with what they bring."""
        for answer, num_bytes in self._uncounted:
            self._traffic.count_message("direct", "received", answer, num_bytes)
            self.count_bytes("received", num_bytes)
        self._uncounted.clear()

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """Ends the stream at once; from any thread. An expelled drafter is left alone for a while."""
        if self.failure is None:
            self.failure, self.is_expelled = reason, expel
            self._loop.call_soon_threadsafe(self._cancel)
