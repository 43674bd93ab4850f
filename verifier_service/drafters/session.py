"""A session: a stream to a drafter, with its sequences and unanswered messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.tensors import decode_id_array, decode_probabilities
from draftwire.transport import Outgoing
from draftwire.v1 import draft_pb2
from verifier_service.core.request import Request
from verifier_service.drafters.breaker import Breaker, Circuit
from verifier_service.drafters.stream import AnnouncedStep, Stream
from verifier_service.pacing import Message, Pace

# Maximum number of unanswered steps, and the seconds without an answer after which the drafter counts as lost.
MAX_UNANSWERED_STEPS = 32
LOST_AFTER_S = 10.0
# Maximum number of announced steps that are neither committed nor replaced; a drafter rejects more.
MAX_ANNOUNCED = 4


@dataclass(eq=False)
class DraftSession:
    """A stream with its sequences and unanswered messages."""

    stream: Stream
    draft_token_ids: torch.Tensor | None  # target ids of the head's vocabulary, on the target's device
    pace: Pace
    breaker: Breaker
    step_id: int = 0
    last_sequence_id: int = 0
    bindings: list[Binding] = field(default_factory=list)
    sequences: dict[int, Binding] = field(default_factory=dict)  # open sequences, by id
    closed_ids: list[int] = field(default_factory=list)
    unanswered: dict[int, Message] = field(default_factory=dict)  # by step
    is_late: bool = False
    is_draining: bool = False
    catches_up: bool = False  # whether only backlogs are sent, without drafts
    few_since: float = 0.0  # monotonic time since which at most half of the sequences have a backlog
    others: int = 0  # last reported number of open sequences of other verifiers
    kv_cache_usage: float = 0.0  # last reported usage in [0, 1]
    last_received: float = 0.0  # monotonic time of the last answer
    reported: Circuit = Circuit.CLOSED  # the breaker's state that the link knows
    early: EarlyFeatures | None = None  # those of the last committed step, until they are sent or given up
    committed: CommittedStep | None = None  # the last Commit, until it is answered
    last_announced: int = 0  # id of the last announced step
    last_resolved: int = 0  # id up to which all announced steps are committed or will be replaced

    def take_load(self, load: draft_pb2.DrafterLoad) -> None:
        """Record the drafter's reported load."""
        self.others = max(0, load.sequences - len(self.sequences))
        self.kv_cache_usage = load.kv_cache_usage

    def give_up_early(self) -> None:
        """Give up early features that no message uses. If their step was announced, the next message replaces it."""
        early, self.early = self.early, None
        if early is None:
            return
        if early.announced is not None:
            # The drafter releases the memory of features and tokens, so the device must have written them.
            early.features.wait()
            self.last_resolved = early.announced.announced_id
        else:
            early.features.give_up()

    @property
    def may_announce(self) -> bool:
        """Return whether a step may be announced now."""
        is_full = self.last_announced - self.last_resolved >= MAX_ANNOUNCED
        return self.has_room and not is_full and self.stream.may_announce

    def awaited_answer(self) -> AwaitedAnswer | None:
        """Return the answer with all awaited drafts; None if there are several."""
        step_id = next(reversed(self.unanswered))
        waiting = [binding for binding in self.bindings if binding.wait_until is not None]
        if any(binding.asked_step != step_id for binding in waiting):
            return None
        committed = self.committed
        if committed is not None and (committed.step_id != step_id or committed.bindings != waiting):
            committed = None
        return AwaitedAnswer(
            self.stream,
            step_id,
            [binding.sequence_id for binding in waiting],
            [binding.asked_drafts for binding in waiting],
            [binding.request for binding in waiting],
            committed,
        )

    @property
    def load(self) -> float:
        """Return the drafter's utilization by all verifiers: the larger of its sequences' and its cache's."""
        return max((self.others + len(self.bindings)) / max(self.stream.head.max_sequences, 1), self.kv_cache_usage)

    @property
    def has_room(self) -> bool:
        """Return whether the drafter accepts another step."""
        return not (self.is_late or self.is_draining) and len(self.unanswered) < MAX_UNANSWERED_STEPS

    @property
    def is_counted_on(self) -> bool:
        """Return whether drafts are requested after each step."""
        return not (self.pace.is_off or self.catches_up)

    @property
    def takes_more(self) -> bool:
        """Return whether the drafter accepts another sequence."""
        if self.is_late or self.is_draining or self.breaker.is_open or self.pace.is_off:
            return False
        return len(self.bindings) < (1 if self.breaker.is_on_trial else self.stream.head.max_sequences)

    @property
    def unanswered_bytes(self) -> int:
        """Return the bytes of unanswered features."""
        return sum(message.num_bytes for message in self.unanswered.values())

    @property
    def silent_since(self) -> float | None:
        """Return the monotonic time since which an answer is missing; None if none is missing."""
        return max(next(iter(self.unanswered.values())).sent, self.last_received) if self.unanswered else None

    @property
    def lost_at(self) -> float:
        """Return the monotonic time at which the drafter counts as lost."""
        return next(iter(self.unanswered.values())).sent + LOST_AFTER_S if self.unanswered else math.inf


@dataclass(eq=False)
class Binding:
    """A request's place at a drafter."""

    request: Request
    session: DraftSession
    next_row: int  # first row that has not been sent
    sequence_id: int = 0  # set when the first rows are sent, so that ids ascend on the stream; 0 before
    asked_length: int = 0  # committed length when drafts were last requested
    asked_drafts: int = 0  # drafts requested then
    asked_step: int = 0  # step with that request
    wait_until: float | None = None  # monotonic time until which the request waits for drafts
    first_length: int = field(init=False)  # committed length when the request took the place

    def __post_init__(self) -> None:
        self.first_length = len(self.request.tokens)

    @property
    def is_open(self) -> bool:
        """Return whether the sequence is open at the drafter."""
        return self.session.sequences.get(self.sequence_id) is self

    @property
    def rows_behind(self) -> int:
        """Return the number of rows that have not been sent."""
        return self.request.num_feature_rows - self.next_row

    @property
    def is_waiting(self) -> bool:
        """Return whether the request waits for drafts."""
        return self.wait_until is not None and not self.session.is_late

    def waits_at(self, now: float) -> bool:
        """Return whether the request waits for drafts at a monotonic time."""
        return self.wait_until is not None and now < self.wait_until and not self.session.is_late


class EarlyFeatures(NamedTuple):
    """Features of a step's accepted rows, which the device writes before the host has the step's tokens.

    They are valid for a message with these sequences and first rows, in which each sequence has one row per sampled
    token. Later events, such as the end of a request, change the message.
    """

    bindings: list[Binding]
    first_rows: list[int]
    features: Outgoing
    announced: AnnouncedStep | None

    def is_unchanged(self, bindings: Sequence[Binding], first_rows: Sequence[int], num_drafts: Sequence[int]) -> bool:
        """Return whether the step to send is the step for which these features were written.

        Only this method decides whether an announced step is committed. Sequences of an announced step may have been
        closed since, and fewer drafts may be requested. In a step that was not announced no sequence may have been
        closed, because its features would lie between the others.
        """
        left = [place for place, binding in enumerate(self.bindings) if binding.is_open]
        if [self.bindings[place] for place in left] != bindings:
            return False
        if [self.first_rows[place] for place in left] != first_rows:
            return False
        if self.announced is None:
            return len(left) == len(self.bindings)
        return 0 < max(num_drafts, default=0) <= self.announced.num_drafts


class UncheckedDrafts(NamedTuple):
    """Drafts with which a pass may start before their answer has been checked, sequence after sequence."""

    tokens: np.ndarray  # int32 [D], ids in the vocabulary
    confidences: np.ndarray | None  # float32 [D], arbitrary values; None without confidences


class CommittedStep(NamedTuple):
    """A committed step, whose early drafts may be read."""

    step_id: int
    bindings: list[Binding]  # those with requested drafts
    places: list[int]  # their indices among the announced sequences
    announced: AnnouncedStep


@dataclass(eq=False)
class AwaitedAnswer:
    """The one answer with all awaited drafts, if each sequence gets the requested drafts."""

    stream: Stream
    step_id: int
    sequence_ids: list[int]
    num_drafts: list[int]  # requested drafts of each sequence
    requests: list[Request]
    committed: CommittedStep | None = None  # step with early drafts in shared memory; None after they were read

    def has_early_drafts(self) -> bool:
        """Return whether there are unread early drafts."""
        committed = self.committed
        return committed is not None and self.stream.has_early_drafts(committed.announced)

    def read_early_drafts(self, vocab_size: int) -> UncheckedDrafts | None:
        """Return the early drafts; None if they are missing or not valid token ids.

        The answer must confirm the drafts; a pass that started with wrong drafts is dropped.
        """
        committed, is_there = self.committed, self.has_early_drafts()
        self.committed = None  # they are read once
        if committed is None or not is_there:
            return None
        drafts = self.stream.read_early_drafts(committed.announced)[committed.places]
        drafts = drafts[np.arange(drafts.shape[1]) < np.array(self.num_drafts)[:, None]]
        tokens, confidences = drafts, None
        if committed.announced.confidences:
            tokens, confidences = drafts[:, 0].copy(), drafts[:, 1].copy().view(np.float32)
        return UncheckedDrafts(tokens, confidences) if _are_ids(tokens, vocab_size) else None

    def read_answer(self, answer: draft_pb2.Drafts, vocab_size: int) -> UncheckedDrafts | None:
        """Return the drafts of an unchecked answer; None if it is another answer or its drafts are invalid.

        The rest of the answer is checked later: if it is wrong, a pass that started with the drafts is dropped.
        """
        if answer.step_id != self.step_id or answer.sequence_ids[:] != self.sequence_ids:
            return None
        if answer.num_drafts[:] != self.num_drafts:
            return None
        total, confidences = sum(self.num_drafts), None
        try:
            tokens = decode_id_array(answer.tokens, "drafts.tokens", total)
            if self.stream.head.confidences:
                confidences = decode_probabilities(answer.confidences, "drafts.confidences", total)
        except InvalidArgumentError:
            return None
        return UncheckedDrafts(tokens, confidences) if _are_ids(tokens, vocab_size) else None


def _are_ids(tokens: np.ndarray, vocab_size: int) -> bool:
    """Return whether all values are token ids; as unsigned integers, negative ids exceed every valid id."""
    return int(tokens.view(np.uint32).max(initial=0)) < vocab_size
