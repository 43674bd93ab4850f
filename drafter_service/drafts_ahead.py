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

import numpy as np

from drafter_service.draft_loop import DraftLoop
from drafter_service.heads.spec import Head
from drafter_service.proposer import DraftRows, Launched, Proposal, Proposer
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
        self._begun: BatchAhead | None = None
        self._unread: Launched | None = None  # of a batch in vain, whose inputs the device may still read

    def foresee(self, session: Session, step: UpcomingStep) -> None:
        """Takes a step that a session has foretold."""
        own = [one for one in self._upcoming if one[0] is session]
        if len(own) == MAX_UPCOMING:
            self._upcoming.remove(own[0])
        self._upcoming.append((session, step))

    def note(self, session: Session, step: Step) -> None:
        """A step has come: what was foretold of its sequences and has not been begun is not, and what has been begun
        only for sequences that it closes, or wants no drafts of, is given up."""
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

    @property
    def is_ready(self) -> bool:
        """Whether one can be begun: its tokens are on the board."""
        has_place = self._begun is None or self._is_stale(self._begun)
        return has_place and any(self._is_ready(*one) for one in self._upcoming)

    def _is_stale(self, batch: BatchAhead) -> bool:
        return time.monotonic() > batch.begun + STALE_S and self.is_done(batch)

    def _is_ready(self, session: Session, step: UpcomingStep) -> bool:
        return session.steps_ahead > 0 and step.board.is_written(step.generation, step.offset)

    def begin(self) -> None:
        """Begins the first that is ready, if its sequences are as they were foretold."""
        entry = next((one for one in self._upcoming if self._is_ready(*one)), None)
        if entry is None:
            return
        self._upcoming.remove(entry)
        if self._begun is not None:
            self._waste()
        session, step = entry
        rows = self._rows_of(session, step)
        if rows is None:
            return
        try:
            features = step.receiver.look(step.features_offset, step.dtype, (len(rows.tokens), step.width))
        except InvalidArgumentError as error:
            logger.debug("%s: features were foretold where there are none: %s", session.terms.verifier, error)
            return
        session.steps_ahead -= 1
        began = time.monotonic()
        self.settle()
        if not step.is_fused:
            features = self._head.fuse(features.to(self._loop.states.device, non_blocking=True))
        self._loop.state_rows(0, len(rows.tokens)).copy_(features, non_blocking=True)
        launched = self._launch(session, rows)
        drafts = self._loop.drafts_on_device(launched.num_sequences, launched.num_drafts)
        step.board.answer(step.generation, step.offset, drafts)
        places = {sequence_id: place for place, sequence_id in enumerate(step.sequence_ids)}
        self._begun = BatchAhead(session, places, rows, began, launched)

    def _rows_of(self, session: Session, step: UpcomingStep) -> DraftRows | None:
        """The rows that a step will have, and the drafts that it may want; None where they do not fit the sequences."""
        table, count = self._table, len(step.sequence_ids)
        numbers = step.board.read(step.offset, (count, step.columns))
        counts, tokens = numbers[:, 0].astype(np.int64), numbers[:, 1:]
        if counts.min() < 1 or counts.max() >= step.columns:
            return None
        tokens = tokens[np.arange(step.columns - 1) < counts[:, None]]
        if np.count_nonzero(tokens.view(np.uint32) >= self._head.spec.target_vocab_size):
            return None
        slots = np.fromiter(map(session.slots.get, step.sequence_ids, repeat(-1)), np.int64, count)
        fits = (step.first_rows == table.next_row[slots]) & table.has_room(slots, step.first_rows + counts)
        if np.count_nonzero(fits) < count:
            return None
        return DraftRows(slots, step.first_rows, counts, step.num_drafts, tokens)

    def _launch(self, session: Session, rows: DraftRows) -> Launched:
        """Computes them as if the rows were true already, which they are when the step has come."""
        next_row = self._table.next_row
        next_row[rows.slots] = rows.first_rows + rows.counts
        try:
            num_drafts = self._table.reserve_drafts(rows.slots, rows.num_drafts)
            return self._proposer.launch(session.terms.mode, rows._replace(num_drafts=num_drafts))
        finally:
            next_row[rows.slots] = rows.first_rows

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
