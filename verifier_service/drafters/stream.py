"""An open stream to a drafter, and its events, for the engine's thread."""

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
    """The head of a connected drafter."""

    fingerprint: str
    layers: tuple[int, ...]
    dtype: torch.dtype  # dtype of the features on the wire
    draft_vocab_size: int
    draft_token_ids: torch.Tensor | None  # int64 [draft_vocab_size], None if the vocabularies are equal
    row_bytes: int  # size of a feature row on the wire
    max_drafts: int
    max_sequences: int
    max_model_len: int
    fusion: FeatureFusion | None = None  # applied before features are sent; None: unfused features
    fusion_digest: str = ""
    confidences: bool = False  # whether each draft has a confidence

    @property
    def kind(self) -> FeatureKind:
        """Return the kind of the sent features; fused features are valid only for this head."""
        return FeatureKind(self.layers, f"{self.fingerprint} {self.fusion_digest}" if self.fusion else "")

    @property
    def width(self) -> int:
        """Return the number of elements of a feature row on the wire."""
        return self.row_bytes // self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Connected:
    """Event: a stream has been opened. Each stream is a new `Stream` object."""

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
    """Event: a drafter drains, and answers only steps that were already sent."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Loaded:
    """Event: a drafter has reported its load; answers also report it."""

    stream: Stream
    load: draft_pb2.DrafterLoad


StepMessage = draft_pb2.DraftStep | draft_pb2.Commit
LinkEvent = Connected | Disconnected | Answered | Draining | Loaded


class AnnouncedStep(NamedTuple):
    """An announced step."""

    announced_id: int
    num_drafts: int  # drafts per sequence
    num_sequences: int
    confidences: bool  # whether each early draft has a confidence

    @property
    def early_shape(self) -> tuple[int, ...]:
        """Shape of the early drafts, as defined by `EarlyDrafts` in draft.proto."""
        return (self.num_sequences, self.num_drafts, 2) if self.confidences else (self.num_sequences, self.num_drafts)


class Stream:
    """An open stream. Only the engine's thread calls its methods, except for those marked thread-safe.

    Messages that fit are sent through the channel, if there is one, without another thread (`Rendezvous` in
    draft.proto).

    Attributes:
        sender: Allocates send buffers for the features of a step.
        receiver: Receives the draft logits of an answer.
        on_trial: Whether the drafter was expelled on its previous stream.
        released: Set by `release`; for the event loop.
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
        """`status`: the drafter's status, in which bytes are counted; `traffic` counts messages and bytes of all
        channels; `loop`: by default the running event loop."""
        self.address = status.address
        self.head = head
        self.sender = sender
        self.receiver = receiver
        # None ends the stream.
        self.outbox: asyncio.Queue[tuple[StepMessage, Outgoing | None] | None] = asyncio.Queue()
        self.on_trial = on_trial
        self.released = asyncio.Event()
        self.failure: str | None = None
        self.is_expelled = False
        self._num_unanswered = 0  # number of sent steps without an answer
        self._status = status
        self._cancel = cancel
        self._report = report
        self._traffic = traffic
        self._loop = loop or asyncio.get_running_loop()
        self._lock = threading.Lock()  # protects the counts
        self._last_queued = 0  # id of the last step sent over the stream
        self._last_answered = 0  # id of the last answered step
        self._channel = channel
        self._last_announced = 0  # announced_id of the last announced step
        self._resolved = (0, 0)  # the last sent step, and the announced_id up to which it resolves announced steps
        self._last_early = 0  # announced_id of the last early drafts
        self._early: tuple[int, Body] | None = None  # announced_id and drafts of the last step that the drafter started
        # Messages read from the channel, with their bytes.
        self._uncounted: list[tuple[draft_pb2.DraftResponse, int]] = []

    def send(self, step: StepMessage, features: Outgoing | None = None) -> None:
        """Send a step and its features without waiting for the drafter."""
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
        """Send a message through the channel; return False if it does not fit."""
        if self._channel is None or not self._channel.send(request.data, numbers):
            return False
        self._traffic.count_message("direct", "sent", request.message, len(request.data))
        self.count_bytes("sent", len(request.data))
        return True

    def report(self, state: generate_pb2.DrafterState) -> None:
        """Show the drafter in this state while the stream is open; thread-safe."""
        self._loop.call_soon_threadsafe(self._report, self, state)

    def end(self) -> None:
        """End the sending side; the drafter then ends the stream."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, None)

    @property
    def may_announce(self) -> bool:
        """Return whether the next step may be announced."""
        return self._channel is not None and self._channel.takes_numbers and self.is_direct_next

    def announce(self, message: draft_pb2.Announce, numbers: torch.Tensor, features: Outgoing) -> AnnouncedStep | None:
        """Announce a step, and let the current CUDA stream write its `numbers` for the drafter.

        Returns:
            The announced step; None if it could not be announced. Then the caller keeps the features.
        """
        features.announce(message.features)
        request = draft_pb2.DraftRequest(announce=message)
        if not self._send_direct(Encoded(request, request.SerializeToString()), numbers):
            features.take_back()
            return None
        self._last_announced = message.announced_id
        return AnnouncedStep(message.announced_id, message.num_drafts, len(message.sequence_ids), self.head.confidences)

    def has_early_drafts(self, announced: AnnouncedStep) -> bool:
        """Return whether the drafts of an announced step have been written."""
        if self._early is None:
            return False
        announced_id, body = self._early
        num_numbers = math.prod(announced.early_shape)
        return announced_id == announced.announced_id and body.num_numbers == num_numbers and body.is_written

    def read_early_drafts(self, announced: AnnouncedStep) -> np.ndarray:
        """Return an unchecked copy of the early drafts, int32 of `early_shape`."""
        assert self._early is not None
        return self._early[1].read(announced.early_shape)

    def _take_early(self, early: draft_pb2.EarlyDrafts, body: Body | None) -> None:
        """Record that the drafter has started an announced step, and release the early drafts of the previous one."""
        if body is None or not self._last_early < early.announced_id <= self._last_announced:
            allowed = f"allowed range [{self._last_early + 1}, {self._last_announced}], announced and not yet begun"
            raise InvalidArgumentError("early.announced_id", early.announced_id, f"{allowed}; must have a body")
        if self._early is not None:
            self._early[1].release()
        self._last_early = early.announced_id
        self._early = early.announced_id, body

    @property
    def is_direct_next(self) -> bool:
        """Return whether the next step may use the channel without overtaking steps sent over the stream."""
        return self._channel is not None and self._last_answered >= self._last_queued

    def encode(self, step: StepMessage, features: Outgoing | None) -> Encoded:
        """Wait for a step's features, and return the encoded step."""
        step.logits_read = self.receiver.generation_read
        if isinstance(step, draft_pb2.Commit):
            if features is not None:
                features.wait()
            request = draft_pb2.DraftRequest(commit=step)
            return Encoded(request, request.SerializeToString())
        return encode_step(step, None if features is None else features.finish(step.features))

    @property
    def is_direct(self) -> bool:
        """Return whether there is a channel, whose `fileno` is readable when messages have arrived."""
        return self._channel is not None

    def fileno(self) -> int:
        """Return the channel's file descriptor, which is readable when messages have arrived."""
        assert self._channel is not None
        return self._channel.fileno()

    def release(self) -> None:
        """Close the channel, and let the drafter get a new stream. Call after all events of this one were handled."""
        if self._channel is not None:
            self._channel.close()
        self._loop.call_soon_threadsafe(self.released.set)

    def count_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Count the bytes of a step or an answer in the drafter's status; thread-safe."""
        with self._lock:
            if direction == "sent":
                self._status.sent_message_bytes += num_bytes
            else:
                self._status.received_message_bytes += num_bytes

    def count_answer(self) -> bool:
        """Count an answer, and return whether a step was unanswered; thread-safe."""
        with self._lock:
            self._num_unanswered -= 1
            return self._num_unanswered >= 0

    def record_answer(self, drafts: draft_pb2.Drafts) -> None:
        """Record an answer.

        Raises:
            InvalidArgumentError: If the answer claims to have read features that were not sent.
        """
        self._last_answered = drafts.step_id
        step_id, announced_id = self._resolved
        if self._early is not None and step_id <= drafts.step_id and self._early[0] <= announced_id:
            self._early[1].release()  # otherwise later records would wait behind this one
            self._early = None
        self.sender.release(drafts.features_read, "drafts.features_read")

    def read_direct(self) -> list[LinkEvent] | None:
        """Return the answers that have arrived through the channel; None after the stream has failed or ended."""
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
        """Count the messages that `read_direct` has read; a separate call, so that a step can start with them first."""
        for answer, num_bytes in self._uncounted:
            self._traffic.count_message("direct", "received", answer, num_bytes)
            self.count_bytes("received", num_bytes)
        self._uncounted.clear()

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """End the stream at once; thread-safe. An expelled drafter gets no new stream for a while."""
        if self.failure is None:
            self.failure, self.is_expelled = reason, expel
            self._loop.call_soon_threadsafe(self._cancel)
