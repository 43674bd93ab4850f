"""A step on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafter_service.answer import Answer
from drafter_service.sequence_table import SequenceTable
from drafter_service.step import Step
from draftwire.v1 import draft_pb2 as pb


@dataclass(eq=False)
class StepRows:
    """Rows of a step that one batch computes: int64 [n] each, one entry for each sequence."""

    work: StepWork
    indices: np.ndarray  # of the sequence in the step
    slots: np.ndarray  # of the sequence in the table
    first_rows: np.ndarray  # position of the first row
    offsets: np.ndarray  # of the first row in the step's tensors
    counts: np.ndarray
    num_drafts: np.ndarray  # drafts wanted after the rows; 0 while more of the sequence's rows follow

    def select(self, chosen: np.ndarray) -> StepRows:
        """The entries of a mask."""
        if chosen.all():
            return self
        columns = (self.indices, self.slots, self.first_rows, self.offsets, self.counts, self.num_drafts)
        return StepRows(self.work, *(column[chosen] for column in columns))

    @property
    def sequence_ids(self) -> list[int]:
        """Ids of the sequences."""
        ids = self.work.step.sequence_ids
        return [ids[index] for index in self.indices.tolist()]

    @property
    def committed_lengths(self) -> np.ndarray:
        """Committed length of each sequence, counted up to its last row here."""
        return self.first_rows + self.counts + 1

    @property
    def last_tokens(self) -> np.ndarray:
        """Token of each last row."""
        return self.work.tokens[self.offsets + self.counts - 1]

    def rows(self) -> slice | np.ndarray:
        """Places of the rows in the step's tensors; a slice where they are neighbours."""
        ends = self.counts.cumsum()
        num_rows, begin = ends.item(-1), self.offsets.item(0)
        if self.offsets.item(-1) + self.counts.item(-1) == begin + num_rows:
            return slice(begin, begin + num_rows)
        return np.repeat(self.offsets - (ends - self.counts), self.counts) + np.arange(num_rows)

    def announce(self) -> None:
        """Answers the sequences but for their drafts, which `Answer.add_drafts` must add."""
        self.work.answer.add_sequences(self.sequence_ids, self.committed_lengths, self.last_tokens)

    def withdraw(self, chosen: np.ndarray) -> None:
        """Answers these entries, where they want drafts, without any."""
        chosen = chosen & (self.num_drafts > 0)
        if chosen.any():
            part = self.select(chosen)
            none = np.zeros(len(part.counts), np.int64)
            part.announce()
            self.work.answer.add_drafts(none, np.empty(0, np.int32))
            self.num_drafts[chosen] = 0

    def split(self, most: int) -> tuple[StepRows, StepRows]:
        """(all but the last row of each entry of more than `most` rows, the rest of each entry)."""
        is_long = self.counts > most
        if not is_long.any():
            return self.select(is_long), self
        lead = self.select(is_long)
        head = StepRows(
            self.work, lead.indices, lead.slots, lead.first_rows, lead.offsets, lead.counts - 1, lead.num_drafts * 0
        )
        skipped = np.where(is_long, self.counts - 1, 0)
        tail = StepRows(
            self.work,
            self.indices,
            self.slots,
            self.first_rows + skipped,
            self.offsets + skipped,
            self.counts - skipped,
            self.num_drafts,
        )
        return head, tail


class StepWork:
    """Rows that are still to be computed, and the answer as far as it is known."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.answer = Answer(step.step_id)
        self.is_admitted = False
        self.rows_left = 0
        # Indices, slots, offsets of the first rows, rows and drafts wanted of the sequences with rows left, in order.
        self._left: tuple[np.ndarray, ...] = ()
        self.tokens = step.tokens

    def admit(self, slots: np.ndarray) -> None:
        """Leaves the rows of the step's sequences at `slots` [S] to be computed."""
        counts = self.step.num_rows
        self.is_admitted = True
        self.rows_left = len(self.tokens)
        self._left = (np.arange(len(counts)), slots, counts.cumsum() - counts, counts, self.step.num_drafts)

    def keep(self, chosen: np.ndarray) -> None:
        """Computes the rows of no other sequences than the `chosen` [S]; to be called before any are taken."""
        self._left = tuple(column[chosen] for column in self._left)
        self.rows_left = int(self._left[3].sum())

    def forget(self, slot: int) -> int:
        """Computes no more rows of the sequence at `slot`, which is answered as unknown; how many rows were left."""
        if not self.rows_left:
            return 0
        indices, slots, _, counts, _ = self._left
        is_gone = slots == slot
        for index in indices[is_gone].tolist():
            self.answer.add_failure(self.step.sequence_ids[index], pb.SEQUENCE_STATUS_UNKNOWN)
        self._left = tuple(column[~is_gone] for column in self._left)
        num_rows = int(counts[is_gone].sum())
        self.rows_left -= num_rows
        return num_rows

    def take(self, limit: int, table: SequenceTable) -> StepRows:
        """Takes the next rows, `limit` at most; each sequence then counts its own as true."""
        indices, slots, offsets, counts, num_drafts = self._left
        num_drafts = num_drafts.copy()
        if self.rows_left <= limit:
            self.rows_left = 0
        else:
            ends = np.cumsum(counts)
            last = int(np.searchsorted(ends, limit))  # of the sequences touched
            beyond = int(ends[last]) - limit
            rest_offsets, rest_counts = offsets[last:].copy(), counts[last:].copy()
            rest_offsets[0] += counts[last] - beyond
            rest_counts[0] = beyond
            rest = (indices[last:], slots[last:], rest_offsets, rest_counts, num_drafts[last:].copy())
            self._left = tuple(column[int(beyond == 0) :] for column in rest)
            self.rows_left -= limit
            indices, slots, offsets = indices[: last + 1], slots[: last + 1], offsets[: last + 1]
            counts, num_drafts = counts[: last + 1].copy(), num_drafts[: last + 1]
            counts[last] -= beyond
            num_drafts[last] *= beyond == 0
        first_rows = table.next_row[slots]
        table.next_row[slots] = first_rows + counts
        return StepRows(self, indices, slots, first_rows, offsets, counts, num_drafts)
