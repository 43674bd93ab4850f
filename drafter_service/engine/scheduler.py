"""The scheduler: waiting rows of the next batch, and room for sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from drafter_service.engine.sequence_table import SequenceTable
from drafter_service.engine.session import Session
from drafter_service.engine.step import Step
from drafter_service.engine.step_work import StepRows, StepWork
from drafter_service.limits import EngineLimits
from draftwire.model.block_pool import blocks_for
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass
class Batch:
    """Rows to compute, and the steps that these rows complete. A sequence may have rows of several steps, in order."""

    rows: list[tuple[Session, StepRows]] = field(default_factory=list)
    finished: list[tuple[Session, StepWork]] = field(default_factory=list)


class Scheduler:
    """Opens, feeds and closes sequences as the sessions' steps say, and shares rows, slots and blocks among the
    sessions.

    Rows of a batch are shared evenly. The first session to ask gets slots and blocks. When none are left, a session
    takes sequences from the session that holds the most, until both hold the same.
    """

    def __init__(self, limits: EngineLimits, table: SequenceTable) -> None:
        self.takes_sequences = True
        self.num_evictions = 0
        self._limits = limits
        self._table = table
        self._is_busy = np.zeros(limits.max_num_seqs, bool)  # the slots with rows in the batch
        self._dropped: list[int] = []  # slots of the batch whose sequences were closed

    def next_batch(self, sessions: Sequence[Session]) -> Batch:
        """Return the next batch: max_batch_rows shared evenly; sessions with more waiting rows share the unused rows.

        So drafts never wait for another session's prefill, and no prefill starves. Call `end_batch` after the batch was
        computed, before the next call.
        """
        batch = Batch()
        waiting = [session for session in sessions if session.waiting_steps]
        waiting.sort(key=lambda session: (not session.has_claimed, session.waiting_rows))
        budget = self._limits.max_batch_rows
        for index, session in enumerate(waiting):
            budget -= self._take(session, sessions, budget // (len(waiting) - index), batch)
        return batch

    def end_batch(self) -> None:
        """Free the slots and blocks that only the computed batch used."""
        for slot in self._dropped:
            self._table.close(slot)
        self._dropped.clear()
        self._is_busy[:] = False

    def drop(self, session: Session, sequence_id: int) -> None:
        """Forget a sequence; its blocks are free after the batch that uses them."""
        slot = session.slots.pop(sequence_id, None)
        if slot is None:
            return
        if self._is_busy[slot]:
            self._dropped.append(slot)
        else:
            self._table.close(slot)

    def _take(self, session: Session, sessions: Sequence[Session], share: int, batch: Batch) -> int:
        """Take up to `share` rows of a session's steps, in order."""
        taken = 0
        parts: list[StepRows] = []
        while session.waiting_steps and taken < share:
            work = session.waiting_steps[0]
            if not work.is_admitted:
                if self._closes_busy(session, work.step):
                    break
                session.has_claimed = self._claim(session, sessions, work.step)
                if session.has_claimed:
                    break
                self._admit(session, work)
            if left := work.rows_left:
                part = work.take_rows(share - taken, self._table)
                self._is_busy[part.slots] = True
                taken += left - work.rows_left
                parts.append(part)
            if work.rows_left:
                break
            batch.finished.append((session, session.waiting_steps.popleft()))
        self._drop_superseded(session, parts)
        batch.rows += [(session, part) for part in parts if len(part.counts)]
        session.waiting_rows -= taken
        return taken

    def _closes_busy(self, session: Session, step: Step) -> bool:
        """Return whether a step closes a sequence with rows in this batch, whose slot is free only after the batch."""
        slots = [session.slots[sequence_id] for sequence_id in step.closed_ids if sequence_id in session.slots]
        return bool(slots) and bool(self._is_busy[slots].any())

    def _claim(self, session: Session, sessions: Sequence[Session], step: Step) -> bool:
        """Make room for a step by evictions from sessions that hold more, and return whether the room is free only
        after this batch.

        An evicted sequence is answered as unknown at its next rows, and its verifier opens it again.
        """
        others = [other for other in sessions if other is not session]
        if not others:
            return False
        closed = [session.slots[sequence_id] for sequence_id in {*step.closed_ids} & session.slots.keys()]
        waits_for_slots = self._claim_slots(session, others, step, len(closed))
        return self._claim_blocks(session, others, step, closed) or waits_for_slots

    def _claim_slots(self, session: Session, others: list[Session], step: Step, num_closed: int) -> bool:
        """Evict sequences for slots, as `_claim`; the step closes `num_closed` sequences."""
        own, waits = len(session.slots) - num_closed, False
        wanted = min(len(step.opened), session.terms.max_sequences - own) if self.takes_sequences else 0
        for held in range(own + num_closed + self._table.num_free, own + wanted):
            victim = max(others, key=_num_slots)
            if _num_slots(victim) <= held + 1:
                break
            waits |= self._evict(victim)
        return waits

    def _claim_blocks(self, session: Session, others: list[Session], step: Step, closed: list[int]) -> bool:
        """Evict sequences for blocks, as `_claim`; the step closes the sequences at the slots `closed`.

        A session that held more than its victim afterwards would lose the blocks again when the victim comes back.
        """
        table, waits = self._table, False
        if blocks_for(len(step.tokens)) + len(step.sequence_ids) <= table.num_free_blocks:
            return False
        freed = int(table.num_blocks[closed].sum())
        free, held = table.num_free_blocks + freed, self._num_blocks(session) - freed
        opened = {new.sequence_id for new in step.opened}
        for sequence_id, num_rows in zip(step.sequence_ids, step.num_rows.tolist(), strict=True):
            slot = session.slots.get(sequence_id)
            if slot is None and sequence_id not in opened:
                continue  # unknown: its rows are refused
            missing = blocks_for(num_rows) if slot is None else table.num_missing_blocks(slot, num_rows)
            held, free = held + missing, free - missing
            while free < 0:
                victim = max(others, key=self._num_blocks)
                num_blocks = self._num_blocks(victim)
                if num_blocks <= held:
                    return waits
                waits |= self._evict(victim)
                free += num_blocks - self._num_blocks(victim)
        return waits

    def _num_blocks(self, session: Session) -> int:
        return int(self._table.num_blocks[list(session.slots.values())].sum())

    def _evict(self, session: Session) -> bool:
        """Evict a session's newest sequence, and return whether its room is free only after the batch."""
        self.num_evictions += 1
        sequence_id, slot = next(reversed(session.slots.items()))
        logger.debug("%s: sequence %d makes room for another verifier's", session.terms.verifier, sequence_id)
        if session.waiting_steps:
            session.waiting_rows -= session.waiting_steps[0].forget(slot)
        is_busy = bool(self._is_busy[slot])
        self.drop(session, sequence_id)
        return is_busy

    def _drop_superseded(self, session: Session, parts: list[StepRows]) -> None:
        """Drop the drafts of older steps, so that drafts follow only a sequence's newest rows."""
        named = [
            sequence_id for work in session.waiting_steps if not work.is_admitted for sequence_id in _named(work.step)
        ]
        if not named and len(parts) < 2:
            return
        is_newer = np.zeros_like(self._is_busy)
        is_newer[[session.slots[sequence_id] for sequence_id in named if sequence_id in session.slots]] = True
        for part in reversed(parts):
            part.withdraw(is_newer[part.slots])
            is_newer[part.slots] = True

    def _admit(self, session: Session, work: StepWork) -> None:
        """Close and open sequences, find room for the step's rows, and answer sequences without room."""
        step, table = work.step, self._table
        for sequence_id in step.closed_ids:
            self.drop(session, sequence_id)
        refused = self._open(session, step)
        slots = np.fromiter(map(session.slots.get, step.sequence_ids, repeat(-1)), np.int64, len(step.sequence_ids))
        follows = step.first_rows == table.next_row[slots]
        is_taken = follows & table.has_room(slots, step.first_rows + step.num_rows)
        work.admit(slots)
        if np.count_nonzero(is_taken) < len(is_taken):
            self._make_room(session, work, slots, follows, is_taken, refused)
            work.keep(is_taken)
        for sequence_id in refused:
            work.answer.add_failure(sequence_id, pb.SEQUENCE_STATUS_NO_CAPACITY)
        session.waiting_rows -= len(work.tokens) - work.rows_left

    def _make_room(
        self,
        session: Session,
        work: StepWork,
        slots: np.ndarray,
        follows: np.ndarray,
        is_taken: np.ndarray,
        refused: set[int],
    ) -> None:
        """Reserve blocks for sequences, in order; drop sequences whose rows do not fit."""
        step = work.step
        for index in np.flatnonzero(~is_taken):
            sequence_id = step.sequence_ids[index]
            if sequence_id in refused:
                continue
            is_taken[index] = follows[index] and self._table.reserve(int(slots[index]), int(step.num_rows[index]))
            if not is_taken[index]:
                self.drop(session, sequence_id)
                status = pb.SEQUENCE_STATUS_NO_CAPACITY if follows[index] else pb.SEQUENCE_STATUS_UNKNOWN
                work.answer.add_failure(sequence_id, status)

    def _open(self, session: Session, step: Step) -> set[int]:
        """Open the step's new sequences, and return the ids without room."""
        refused = set()
        for new in step.opened:
            slot = None
            if self.takes_sequences and len(session.slots) < session.terms.max_sequences:
                slot = self._table.open(new)
            if slot is None:
                refused.add(new.sequence_id)
            else:
                session.slots[new.sequence_id] = slot
        return refused


def _num_slots(session: Session) -> int:
    return len(session.slots)


def _named(step: Step) -> list[int]:
    return [*step.sequence_ids, *step.closed_ids]
