"""Early drafts: computed from an announced step's tokens before the verifier commits the step.

The verifier's device writes the tokens that it draws into shared memory. The verifier's host needs time to read and
commit them and to send a message; the head computes meanwhile. A Commit takes the early drafts. A DraftStep that
replaces the announced step drops them, and computes its own drafts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np

from drafter_service.draft_loop.loop import DraftLoop
from drafter_service.engine.proposer import Launched, Prepared, Proposal, Proposer
from drafter_service.engine.sequence_table import SequenceTable
from drafter_service.engine.session import Session
from drafter_service.engine.step import AnnouncedStep, Step
from drafter_service.engine.step_work import StepRows
from drafter_service.heads.spec import Head

# Steps of a session after a dropped early batch until the next early batch may begin.
STEPS_AFTER_WASTE = 4
# Seconds after which an early batch no longer delays other announced steps: its verifier may hang.
STALE_S = 0.05


class PreparedBatch(NamedTuple):
    """An announced step of S sequences, ready for its tokens."""

    step: AnnouncedStep
    inputs: Prepared


@dataclass(eq=False)
class EarlyBatch:
    """An announced step that the device computes before the Commit."""

    session: Session
    step: AnnouncedStep
    begun: float  # monotonic time
    launched: Launched | None  # None after the drafts were copied, to free the buffers for the next batch
    proposal: Proposal | None = None
    ended: float = math.inf  # monotonic time of that copy

    def seconds_before(self, now: float) -> float:
        """Return the seconds of computation before `now`, a monotonic time."""
        return max(0.0, min(self.ended, now) - self.begun)


class EarlyDrafts:
    """Computes one early batch at a time, for one session. Only the engine's thread uses it.

    Attributes:
        num_taken, num_wasted: Early batches that a Commit took, and that were dropped.
    """

    def __init__(self, head: Head, loop: DraftLoop, table: SequenceTable, proposer: Proposer) -> None:
        self.num_taken = self.num_wasted = 0
        self._head = head
        self._loop = loop
        self._table = table
        self._proposer = proposer
        self._announced: deque[tuple[Session, AnnouncedStep]] = deque()  # not begun, committed or dropped
        self._prepared: PreparedBatch | None = None  # the device reads no inputs while there is one
        self._has_tried = False  # whether a step was prepared since the last change
        self._begun: EarlyBatch | None = None
        self._unread: Launched | None = None  # a wasted batch, whose inputs the device may still read

    def announce(self, session: Session, step: AnnouncedStep) -> None:
        """Take a step that a session has announced."""
        self._drop_prepared()
        self._announced.append((session, step))

    def note(self, session: Session, step: Step) -> None:
        """Record a session's step, which may commit or drop announced steps."""
        self._drop_prepared()
        self._announced = deque(one for one in self._announced if not one[1].is_resolved)
        batch = self._begun
        if batch is not None and batch.step.is_dropped:
            self._waste()
            if step.num_drafts.any():  # else no sequence of the session wants drafts, and nothing was lost
                session.steps_ahead = -STEPS_AFTER_WASTE
        if step.sequence_ids:
            session.steps_ahead = min(session.steps_ahead + 1, 1)

    @property
    def has_begun(self) -> bool:
        """Return whether an early batch has begun that is neither taken nor dropped."""
        return self._begun is not None

    @property
    def is_computing(self) -> bool:
        """Return whether the device computes the early batch."""
        return self._begun is not None and not self.is_done(self._begun)

    def poll(self) -> bool:
        """Return whether an early batch can begin, because its tokens have been written.

        Otherwise prepare the first announced step with room, once after each change. Call when no step waits, because
        the preparation depends on the present sequences.
        """
        if not self._announced or (self._begun is not None and not self._is_stale(self._begun)):
            return False
        if self._first_ready() is not None:
            return True
        if not self._has_tried and (self._unread is None or self._proposer.is_done):
            self._prepare_first()
        return False

    def _first_ready(self) -> tuple[Session, AnnouncedStep] | None:
        for entry in self._announced:
            session, step = entry
            if session.steps_ahead > 0 and step.is_written:
                return entry
        return None

    def _is_stale(self, batch: EarlyBatch) -> bool:
        """Return whether the batch has finished and its drafts are no longer awaited. Call only if no step waits."""
        # A resolved step was answered without taking the early drafts: its Commit asked for none.
        is_late = batch.step.is_resolved or time.monotonic() > batch.begun + STALE_S
        return is_late and self.is_done(batch)

    def _prepare_first(self) -> None:
        """Prepare the first announced step with room for its most rows and drafts."""
        for session, step in self._announced:
            slots, counts = _slots(session, step), np.full(len(step.sequence_ids), step.columns - 1)
            if session.steps_ahead <= 0 or min(slots.tolist()) < 0:
                continue
            if not self._table.has_draft_room(slots, step.first_rows, counts, step.num_drafts):
                continue
            inputs = self._prepare(session, step, slots, counts)
            if inputs is not None:
                self._prepared = PreparedBatch(step, inputs)
                break
        self._has_tried = True

    def _prepare(self, session: Session, step: AnnouncedStep, slots: np.ndarray, counts: np.ndarray) -> Prepared | None:
        """Write all inputs that do not depend on the tokens; None when the step does not fit its sequences.

        `slots` as of `_slots`; `counts`, int64 [S], are the most rows that the sequences have.
        """
        self.settle()
        table = self._table
        if np.count_nonzero(step.first_rows != table.next_row[slots]):
            return None
        num_drafts = table.reserve_drafts(slots, np.full(len(counts), step.num_drafts), counts)
        if min(num_drafts.tolist()) < 1:
            return None
        num_rows = min(int(counts.sum()), len(step.features.tensor))
        return self._proposer.prepare(
            session.terms.mode, slots, step.first_rows, num_drafts, num_rows, max(counts.tolist())
        )

    def begin(self) -> None:
        """Begin the first announced step whose tokens have been written, if it fits its sequences."""
        entry = self._first_ready()
        if entry is None:
            return
        began = time.monotonic()
        session, step = entry
        self._announced.remove(entry)
        if self._begun is not None:
            self._waste()
        batch = self._prepared
        self._drop_prepared()
        drawn = step.read()
        if drawn is None:
            return  # its Commit gets the error
        counts, tokens = drawn
        if batch is not None and batch.step is step:
            inputs: Prepared | None = batch.inputs
        else:
            inputs = self._prepare(session, step, _slots(session, step), counts)
        if inputs is None:
            return
        num_rows = len(tokens)
        features = step.features.tensor[:num_rows]
        if not step.is_fused:
            features = self._head.fuse(features.to(self._loop.states.device, non_blocking=True))
        self._loop.state_rows(0, num_rows).copy_(features, non_blocking=True)
        launched = self._proposer.start(inputs, counts, tokens)
        session.steps_ahead -= 1
        self._begun = EarlyBatch(session, step, began, launched)
        if launched.num_drafts == step.num_drafts:  # else the shared memory has no room for all drafts
            confidences = session.terms.mode.confidences
            step.show(self._loop.drafts_on_device(launched.num_sequences, launched.num_drafts, confidences=confidences))

    def _drop_prepared(self) -> None:
        """Drop the prepared step, because its sequences change."""
        self._prepared, self._has_tried = None, False

    def claim(self, parts: list[StepRows]) -> tuple[StepRows, EarlyBatch, np.ndarray] | None:
        """Return the part whose step was started early, its batch and the sequences' places there, int64 [n].

        Return None if there is no such part. A step in several batches is computed like any other step.
        """
        batch = self._begun
        if batch is None:
            return None
        for part in parts:
            work = part.work
            if work.step.announced is not batch.step:
                continue
            if work.is_split:
                self._waste()
                return None
            assert work.step.places is not None
            self._begun = None
            self.num_taken += 1
            return part, batch, work.step.places[part.indices]
        return None

    def is_done(self, batch: EarlyBatch) -> bool:
        """Return whether the drafts have been computed."""
        return batch.launched is None or self._proposer.is_done

    def proposal(self, batch: EarlyBatch) -> Proposal:
        """Wait for the drafts and return them; valid until the next launch."""
        if batch.launched is None:
            assert batch.proposal is not None
            return batch.proposal
        return self._proposer.finish(batch.launched)

    def settle(self) -> None:
        """Wait for the early batch and copy its drafts, before its inputs are overwritten."""
        self._drop_prepared()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._proposer.finish(unread)
        batch = self._begun
        if batch is not None and batch.launched is not None:
            batch.proposal, batch.launched = self._proposer.finish(batch.launched).copy(), None
            batch.ended = time.monotonic()

    def _waste(self) -> None:
        """Drop the early batch."""
        assert self._begun is not None
        self._unread, self._begun = self._begun.launched or self._unread, None
        self.num_wasted += 1

    def forget(self, session: Session) -> None:
        """Forget the announced steps of a session, and with them shared memory."""
        self._drop_prepared()
        self._announced = deque(one for one in self._announced if one[0] is not session)
        if self._begun is not None and self._begun.session is session:
            self._waste()


def _slots(session: Session, step: AnnouncedStep) -> np.ndarray:
    """Return the slots of a step's sequences, int64 [S]; -1 for a sequence that is not open."""
    return np.fromiter(map(session.slots.get, step.sequence_ids, repeat(-1)), np.int64, len(step.sequence_ids))


def chosen(proposal: Proposal, places: np.ndarray, num_drafts: np.ndarray) -> Proposal:
    """Return the drafts at some places, at most `num_drafts` of each, int64 [n] both."""
    if not np.array_equal(places, np.arange(len(proposal.tokens))):
        proposal = proposal.select(places)
    is_wanted = np.arange(proposal.tokens.shape[1]) < num_drafts[:, None]
    return proposal._replace(is_draft=proposal.is_draft & is_wanted)
