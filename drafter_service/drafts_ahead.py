"""Drafts that are begun before the step that asks for them: when the verifier's device has drawn their tokens.

A verifier of this host foretells its next step and has its device write what it draws on a board. Between that and the
step's message lie its host's work and this one's, in which the head can compute. The message alone decides what becomes
of it: drafts of a step that turns out to be another are computed anew.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from drafter_service.draft_loop import DraftLoop
from drafter_service.heads.spec import Head
from drafter_service.proposer import DraftRows, Launched, Prepared, Proposal, Proposer
from drafter_service.sequence_table import SequenceTable
from drafter_service.session import Session
from drafter_service.step import Step, UpcomingStep
from drafter_service.step_work import StepRows
from draftwire.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

# Steps that are foretold and have not come: two groups that take turns, and as many again.
MAX_UPCOMING = 4
# So many steps must come before one is begun ahead again, when one was in vain.
STEPS_AFTER_WASTE = 4
# Nobody asks for what was done so long ago: its verifier hangs, or asks for nothing any more.
STALE_S = 0.05


class PreparedBatch(NamedTuple):
    """An upcoming step of S sequences, made ready for what will be drawn."""

    step: UpcomingStep
    slots: np.ndarray  # int64 [S]
    places: dict[int, int]  # of the sequences, by id
    features: torch.Tensor  # [T, width], where those of the most rows will be
    inputs: Prepared


@dataclass(eq=False)
class BatchAhead:
    """What the device computes ahead, or has computed."""

    session: Session
    places: dict[int, int]  # of the sequences, by id
    rows: DraftRows
    begun: float  # monotonic time
    launched: Launched | None  # None once the drafts have been taken from where the next batch's go
    proposal: Proposal | None = None
    ended: float = math.inf  # monotonic time at which they were

    def seconds_before(self, now: float) -> float:
        """How long it was computed before a monotonic time."""
        return max(0.0, min(self.ended, now) - self.begun)

    def places_of(self, part: StepRows) -> np.ndarray | None:
        """Places, int64 [n], of a step's sequences; None where one has other rows here, or wants more drafts."""
        rows, ids = self.rows, part.sequence_ids
        places = np.fromiter(map(self.places.get, ids, repeat(-1)), np.int64, len(ids))
        if places.min() < 0:
            return None
        is_same = (
            (rows.slots[places] == part.slots)
            & (rows.first_rows[places] == part.first_rows)
            & (rows.counts[places] == part.counts)
            & (rows.num_drafts[places] >= part.num_drafts)
        )
        if np.count_nonzero(is_same) < len(ids):
            return None
        begins = (rows.counts.cumsum() - rows.counts)[places]
        own = np.repeat(begins - (part.counts.cumsum() - part.counts), part.counts) + np.arange(part.num_rows)
        return places if np.array_equal(rows.tokens[own], part.tokens) else None

    def holds_any(self, part: StepRows) -> bool:
        """Whether some of a step's sequences are among these."""
        slots = [self.session.slots[one] for one in self.places if one in self.session.slots]
        return bool(np.isin(part.slots, slots).any())


class DraftsAhead:
    """One batch at a time, of one session. Used by the engine's thread alone.

    Attributes
    ----------
    num_taken, num_wasted
        Batches that a step asked for, and that none did.
    """

    def __init__(self, head: Head, loop: DraftLoop, table: SequenceTable, proposer: Proposer) -> None:
        self.num_taken = self.num_wasted = 0
        self._head = head
        self._loop = loop
        self._table = table
        self._proposer = proposer
        self._upcoming: deque[tuple[Session, UpcomingStep]] = deque()
        self._prepared: PreparedBatch | None = None  # the device reads no inputs while there is one
        self._has_tried = False  # to prepare one, since something has changed
        self._begun: BatchAhead | None = None
        self._unread: Launched | None = None  # of a batch in vain, whose inputs the device may still read

    def foresee(self, session: Session, step: UpcomingStep) -> None:
        """Takes a step that a session has foretold."""
        self._drop_prepared()
        own = [one for one in self._upcoming if one[0] is session]
        if len(own) == MAX_UPCOMING:
            self._upcoming.remove(own[0])
        self._upcoming.append((session, step))

    def note(self, session: Session, step: Step) -> None:
        """A step has come: what was foretold of its sequences and has not been begun is not, and what has been begun
        only for sequences that it closes, or wants no drafts of, is given up."""
        self._drop_prepared()
        batch = self._begun
        if batch is not None and batch.session is session:
            fed = [one for one, drafts in zip(step.sequence_ids, step.num_drafts.tolist(), strict=True) if drafts == 0]
            if not batch.places.keys() - {*step.closed_ids, *fed}:
                self._waste()
        if not step.sequence_ids:
            return
        session.steps_ahead = min(session.steps_ahead + 1, 1)
        if self._upcoming:
            ids = set(step.sequence_ids)
            self._upcoming = deque(
                one for one in self._upcoming if one[0] is not session or ids.isdisjoint(one[1].sequence_ids)
            )

    @property
    def has_begun(self) -> bool:
        """Whether there is one for which no step has asked."""
        return self._begun is not None

    @property
    def is_computing(self) -> bool:
        """Whether the device computes one for which no step has asked."""
        return self._begun is not None and not self.is_done(self._begun)

    def look(self) -> bool:
        """Whether one can be begun: its tokens are on the board. While none can, prepares the first that it can, once
        after each change. To be called when no step waits: what is prepared is for sequences as they are."""
        if not self._upcoming or (self._begun is not None and not self._is_stale(self._begun)):
            return False
        if self._first_ready() is not None:
            return True
        if not self._has_tried and (self._unread is None or self._proposer.is_done):
            self._prepare_first()
        return False

    def _first_ready(self) -> tuple[Session, UpcomingStep] | None:
        for entry in self._upcoming:
            session, step = entry
            if session.steps_ahead > 0 and step.board.is_written(step.generation, step.offset):
                return entry
        return None

    def _is_stale(self, batch: BatchAhead) -> bool:
        return time.monotonic() > batch.begun + STALE_S and self.is_done(batch)

    def _prepare_first(self) -> None:
        """Prepares the first step that has room for as many rows and drafts as it can have."""
        for session, step in self._upcoming:
            counts = np.full(len(step.sequence_ids), step.columns - 1)
            if session.steps_ahead <= 0 or not self._has_room(session, step, counts):
                continue
            self._prepared = self._prepare(session, step, counts)
            if self._prepared is not None:
                break
        self._has_tried = True

    def _has_room(self, session: Session, step: UpcomingStep, counts: np.ndarray) -> bool:
        """Whether its open sequences have the blocks for so many rows and their drafts, or can have them: what may not
        be drawn takes none that others need."""
        slots = np.array([session.slots.get(sequence_id, -1) for sequence_id in step.sequence_ids])
        if min(slots.tolist()) < 0:
            return False
        num_rows = counts + step.num_drafts - 1
        self._table.reserve_ahead(slots, num_rows)
        return bool(self._table.has_room(slots, step.first_rows + num_rows).all())

    def _prepare(self, session: Session, step: UpcomingStep, counts: np.ndarray) -> PreparedBatch | None:
        """Does all for a step that does not depend on what is drawn; None where it does not fit its sequences, or the
        memory of features. `counts`, int64 [S], are the most rows that its sequences will have."""
        self.settle()
        table = self._table
        slots = np.fromiter(map(session.slots.get, step.sequence_ids, repeat(-1)), np.int64, len(counts))
        if np.count_nonzero(step.first_rows != table.next_row[slots]):
            return None
        num_drafts = table.reserve_drafts(slots, counts + step.num_drafts) - counts
        if min(num_drafts.tolist()) < 1:
            return None
        num_rows = int(counts.sum())
        try:
            features = step.receiver.look(step.features_offset, step.dtype, (num_rows, step.width))
        except InvalidArgumentError as error:
            logger.debug("%s: features were foretold where there are none: %s", session.terms.verifier, error)
            return None
        inputs = self._proposer.prepare(
            session.terms.mode, slots, step.first_rows, num_drafts, num_rows, max(counts.tolist())
        )
        places = {sequence_id: place for place, sequence_id in enumerate(step.sequence_ids)}
        return PreparedBatch(step, slots, places, features, inputs)

    def begin(self) -> None:
        """Begins the first that is ready, if its sequences are as they were foretold."""
        entry = self._first_ready()
        if entry is None:
            return
        began = time.monotonic()
        session, step = entry
        self._upcoming.remove(entry)
        if self._begun is not None:
            self._waste()
        batch = self._prepared
        self._drop_prepared()
        drawn = self._read(step)
        if drawn is None:
            return
        counts, tokens = drawn
        if batch is None or batch.step is not step:
            batch = self._prepare(session, step, counts)
            if batch is None:
                return
        num_rows = len(tokens)
        features = batch.features[:num_rows]
        if not step.is_fused:
            features = self._head.fuse(features.to(self._loop.states.device, non_blocking=True))
        self._loop.state_rows(0, num_rows).copy_(features, non_blocking=True)
        launched = self._proposer.start(batch.inputs, counts, tokens)
        session.steps_ahead -= 1
        rows = DraftRows(batch.slots, step.first_rows, counts, step.num_drafts, tokens)
        self._begun = BatchAhead(session, batch.places, rows, began, launched)
        if launched.num_drafts == max(step.num_drafts.tolist()):  # else there is no room for so many
            drafts = self._loop.drafts_on_device(launched.num_sequences, launched.num_drafts)
            step.board.answer(step.generation, step.offset, drafts)

    def _read(self, step: UpcomingStep) -> tuple[np.ndarray, np.ndarray] | None:
        """Counts int64 [S] and tokens int32 [T] of a step's rows; None where those cannot be."""
        numbers = step.board.read(step.offset, (len(step.sequence_ids), step.columns))
        counts, tokens = numbers[:, 0].astype(np.int64), numbers[:, 1:]
        listed = counts.tolist()
        if min(listed) < 1 or max(listed) >= step.columns:
            return None
        tokens = tokens[np.arange(step.columns - 1) < counts[:, None]]
        if np.count_nonzero(tokens.view(np.uint32) >= self._head.spec.target_vocab_size):
            return None
        return counts, tokens

    def _drop_prepared(self) -> None:
        """Something has changed, or is about to, that what is prepared depends on."""
        self._prepared, self._has_tried = None, False

    def find(self, parts: list[StepRows]) -> tuple[StepRows, BatchAhead, np.ndarray] | None:
        """The one of `parts` whose drafts have been begun, the batch, and the places in it of the part's sequences,
        int64 [n]; None when there is none. What was begun for others that some of its sequences have was in vain."""
        batch = self._begun
        if batch is None:
            return None
        for part in parts:
            if not batch.holds_any(part):
                continue
            places = batch.places_of(part)
            if places is not None:
                self._begun = None
                self.num_taken += 1
                return part, batch, places
            batch.session.steps_ahead = 1 - STEPS_AFTER_WASTE
            self._waste()
            return None
        return None

    def is_done(self, batch: BatchAhead) -> bool:
        """Whether its drafts are there."""
        return batch.launched is None or self._proposer.is_done

    def proposal(self, batch: BatchAhead) -> Proposal:
        """Its drafts, for which it waits; valid until the next launch."""
        if batch.launched is None:
            assert batch.proposal is not None
            return batch.proposal
        return self._proposer.take(batch.launched)

    def settle(self) -> None:
        """Waits for what was begun and keeps it, because its inputs are about to be written again."""
        self._drop_prepared()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._proposer.take(unread)
        batch = self._begun
        if batch is not None and batch.launched is not None:
            tokens, is_draft, logits = self._proposer.take(batch.launched)
            batch.proposal, batch.launched = Proposal(tokens.copy(), is_draft.copy(), logits), None
            batch.ended = time.monotonic()

    def _waste(self) -> None:
        """Gives up what was begun."""
        assert self._begun is not None
        self._unread, self._begun = self._begun.launched or self._unread, None
        self.num_wasted += 1

    def forget(self, session: Session) -> None:
        """Forgets what a session has foretold, and with it memory that is shared."""
        self._drop_prepared()
        self._upcoming = deque(one for one in self._upcoming if one[0] is not session)
        if self._begun is not None and self._begun.session is session:
            self._waste()


def chosen(proposal: Proposal, places: np.ndarray, num_drafts: np.ndarray) -> Proposal:
    """The drafts at some places, at most `num_drafts` of each, int64 [n] both."""
    tokens, is_draft, logits = proposal
    if not np.array_equal(places, np.arange(len(tokens))):
        tokens, is_draft = tokens[places], is_draft[places]
        logits = [buffer[places.tolist()] for buffer in logits]
    return Proposal(tokens, is_draft & (np.arange(tokens.shape[1]) < num_drafts[:, None]), logits)
