"""A stream to a drafter with the sequences that draft there."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from draftwire.carriers import Outgoing
from draftwire.v1 import draft_pb2
from verifier_service.breaker import Breaker, Circuit
from verifier_service.draft_stream import Stream
from verifier_service.pacing import NUM_SCOUTS, Message, Pace
from verifier_service.request import Request

if TYPE_CHECKING:
    from verifier_service.features_ahead import FeaturesAhead, Foretold

# Steps that may be on their way unanswered, and how long, until the drafter counts as lost.
MAX_UNANSWERED_STEPS = 32
LOST_AFTER_S = 10.0


@dataclass(eq=False)
class DraftSession:
    """A stream and what is on its way over it."""

    stream: Stream
    draft_token_ids: torch.Tensor | None  # the head's, on the target's device
    pace: Pace
    breaker: Breaker
    step_id: int = 0
    last_sequence_id: int = 0
    bindings: list[Binding] = field(default_factory=list)
    sequences: dict[int, Binding] = field(default_factory=dict)  # those that are open, by id
    closed_ids: list[int] = field(default_factory=list)
    unanswered: dict[int, Message] = field(default_factory=dict)  # by step
    is_late: bool = False
    is_draining: bool = False
    catches_up: bool = False  # whether its sequences lack so many rows that those are sent before
    few_since: float = math.inf  # monotonic time since which no more than a few do, of those that catch up
    asks_nothing: bool = False  # for that, or because rows of prompts and histories keep it for longer than a step
    has_caught_up: bool = False  # whether the scouts were sent what they lacked, and are asked for drafts next
    others: int = 0  # sequences that other verifiers have open there, as last told
    kv_cache_usage: float = 0.0  # likewise, [0, 1]
    last_received: float = 0.0  # monotonic time of the last answer
    reported: Circuit = Circuit.CLOSED  # what the link was told of the breaker
    ahead: FeaturesAhead | None = None  # of the step that has landed last, until they are sent or given up
    foretold: ForetoldStep | None = None  # the last step that was sent as it was foretold, until it is answered
    # Features that were foretold and then not sent, by the step until whose answer the drafter may read them: the last
    # one that was sent, or the next one.
    unsent: deque[tuple[int, Outgoing]] = field(default_factory=deque)

    def take_load(self, load: draft_pb2.DrafterLoad) -> None:
        """Notes what the drafter tells of its load."""
        self.others = max(0, load.sequences - len(self.sequences))
        self.kv_cache_usage = load.kv_cache_usage

    def give_up_ahead(self) -> None:
        """Gives up features that are there before their message and do not go with it."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        if ahead.foretold is not None:
            self.unsent.append((self.step_id + (self.step_id not in self.unanswered), ahead.features))
        else:
            ahead.features.give_up()

    def give_up_unsent(self, step_id: float = math.inf) -> None:
        """Gives up what a drafter does not read any more that has answered a step; by default all, when it is gone."""
        while self.unsent and self.unsent[0][0] <= step_id:
            self.unsent.popleft()[1].give_up()

    @property
    def load(self) -> float:
        """Share of the drafter that is taken, by all verifiers: of its places or, if more, of its cache."""
        return max((self.others + len(self.bindings)) / max(self.stream.head.max_sequences, 1), self.kv_cache_usage)

    @property
    def has_room(self) -> bool:
        """Whether the drafter takes another step."""
        return not (self.is_late or self.is_draining) and len(self.unanswered) < MAX_UNANSWERED_STEPS

    @property
    def is_counted_on(self) -> bool:
        """Whether its sequences are asked for drafts when they have landed."""
        return not (self.pace.is_off or self.asks_nothing)

    @property
    def takes_more(self) -> bool:
        """Whether a sequence more may draft there."""
        if self.is_late or self.is_draining or self.breaker.is_open:
            return False
        most = NUM_SCOUTS if self.pace.is_off else self.stream.head.max_sequences
        if self.breaker.is_on_trial:
            most = 1
        return len(self.bindings) < most

    @property
    def scouts(self) -> list[Binding]:
        """The few by which it is looked after while it is asked for nothing."""
        return self.bindings[:NUM_SCOUTS]

    @property
    def unanswered_bytes(self) -> int:
        """Bytes of features that are on their way unanswered."""
        return sum(message.num_bytes for message in self.unanswered.values())

    def is_due(self, now: float) -> bool:
        """Whether sequences are to be sent there when their step has landed: where nothing is asked for, now and then.
        """
        return not self.pace.is_off or (not self.unanswered and self.pace.governor.is_ping_due(now))

    @property
    def silent_since(self) -> float | None:
        """Monotonic time since which the drafter owes an answer and has given none; None when it owes none."""
        return max(next(iter(self.unanswered.values())).sent, self.last_received) if self.unanswered else None

    @property
    def lost_at(self) -> float:
        """Monotonic time at which the drafter counts as lost."""
        return next(iter(self.unanswered.values())).sent + LOST_AFTER_S if self.unanswered else math.inf


@dataclass(eq=False)
class Binding:
    """A request's place at a drafter."""

    request: Request
    session: DraftSession
    next_row: int  # first row that has not been sent
    sequence_id: int = 0  # given when its first rows are sent, so that ids rise on the stream; 0 before
    asked_length: int = 0  # committed length for which drafts have been asked
    asked_drafts: int = 0
    asked_step: int = 0
    wait_until: float | None = None  # monotonic time until which the request waits for drafts

    @property
    def rows_behind(self) -> int:
        """Rows that the drafter has not been sent."""
        return self.request.num_feature_rows - self.next_row

    @property
    def is_waiting(self) -> bool:
        """Whether its drafts are waited for."""
        return self.wait_until is not None and not self.session.is_late

    def waits_at(self, now: float) -> bool:
        """Whether they are at that monotonic time: their deadline has not passed."""
        return self.wait_until is not None and now < self.wait_until and not self.session.is_late


class ForetoldStep(NamedTuple):
    """A step whose drafts may stand on the board before its answer comes."""

    step_id: int
    bindings: list[Binding]
    told: Foretold


class AwaitedAnswer(NamedTuple):
    """What the one answer that brings all drafts that are waited for will be, if each sequence gets what was asked."""

    stream: Stream
    step_id: int
    sequence_ids: list[int]
    num_drafts: list[int]
    requests: list[Request]
    foretold: Foretold | None = None  # where its drafts may come on the stream's board before
