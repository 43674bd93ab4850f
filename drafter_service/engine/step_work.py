"""A step in progress."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from drafter_service.engine.answer import Answer
from drafter_service.engine.sequence_table import SequenceTable
from drafter_service.engine.step import Step
from draftwire.v1 import draft_pb2 as pb


@dataclass(eq=False)
class StepRows:
    """Rows of a step in one batch; arrays are int64 [n], one entry for each sequence."""

    work: StepWork
    indices: np.ndarray  # of the sequence in the step
    slots: np.ndarray  # of the sequence in the table
    first_rows: np.ndarray  # position of the first row
    ends: np.ndarray  # end of the rows in the step's tensors
    counts: np.ndarray
    num_drafts: np.ndarray  # drafts wanted after the rows; 0 while more of the sequence's rows follow
    num_rows: int  # sum of the counts

    def select(self, chosen: np.ndarray) -> StepRows:
        """Return the entries of a mask."""
        if chosen.all():
            return self
        columns = (self.indices, self.slots, self.first_rows, self.ends, self.counts, self.num_drafts)
        return _rows(self.work, *(column[chosen] for column in columns))

    @property
    def sequence_ids(self) -> list[int]:
        """Return the ids of the sequences."""
        ids = self.work.step.sequence_ids
        return [ids[index] for index in self.indices.tolist()]

    @property
    def committed_lengths(self) -> np.ndarray:
        """Return the committed length of each sequence up to its last row in the batch."""
        return self.first_rows + self.counts + 1

    @property
    def last_tokens(self) -> np.ndarray:
        """Return the token of each last row."""
        return self.work.tokens[self.ends - 1]

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of the rows, int32 [num_rows]."""
        return self.work.tokens if self.num_rows == len(self.work.tokens) else self.work.tokens[self.places()]

    def places(self) -> slice | np.ndarray:
        """Return the places of the rows in the step's tensors, as a slice if contiguous."""
        begin, end = self.ends.item(0) - self.counts.item(0), self.ends.item(-1)
        if end - begin == self.num_rows:
            return slice(begin, end)
        return np.repeat(self.ends - self.counts.cumsum(), self.counts) + np.arange(self.num_rows)

    def announce(self) -> None:
        """Add the sequences to the answer; `Answer.add_drafts` must add their drafts."""
        self.work.answer.add_sequences(self.sequence_ids, self.committed_lengths, self.last_tokens)

    def withdraw(self, chosen: np.ndarray) -> None:
        """Answer the entries that want drafts with no drafts."""
        chosen = chosen & (self.num_drafts > 0)
        if chosen.any():
            part = self.select(chosen)
            none = np.zeros(len(part.counts), np.int64)
            part.announce()
            self.work.answer.add_drafts(none, np.empty(0, np.int32))
            self.num_drafts = np.where(chosen, 0, self.num_drafts)

    def split(self, most: int) -> tuple[StepRows, StepRows]:
        """Return (all but the last row of entries of more than `most` rows, the remaining rows of each entry)."""
        is_long = self.counts > most
        if not is_long.any():
            return self.select(is_long), self
        lead = self.select(is_long)
        head = _rows(
            self.work, lead.indices, lead.slots, lead.first_rows, lead.ends - 1, lead.counts - 1, lead.num_drafts * 0
        )
        skipped = np.where(is_long, self.counts - 1, 0)
        tail = _rows(
            self.work,
            self.indices,
            self.slots,
            self.first_rows + skipped,
            self.ends,
            self.counts - skipped,
            self.num_drafts,
        )
        return head, tail


def _rows(work: StepWork, *columns: np.ndarray) -> StepRows:
    indices, slots, first_rows, ends, counts, num_drafts = columns
    return StepRows(work, indices, slots, first_rows, ends, counts, num_drafts, int(counts.sum()))


class StepWork:
    """Waiting rows of a step, and its answer so far."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.is_admitted = False
        self.is_split = False  # whether a batch has taken a part of the rows
        self.rows_left = 0
        self._unread_rows = len(step.tokens)  # rows whose features were not read yet
        # Indices, slots, ends of the rows, rows and drafts wanted of the sequences with rows left, in order.
        self._left: tuple[np.ndarray, ...] = ()
        self.tokens = step.tokens

    @cached_property
    def answer(self) -> Answer:
        """Return the answer of the step."""
        return Answer(self.step.step_id)

    def read(self, rows: StepRows) -> tuple[np.ndarray, torch.Tensor]:
        """Return the tokens [n] of rows of the step and their features [n, width]; once for each row."""
        self.pass_over(rows)
        places = slice(0, len(self.tokens)) if rows.num_rows == len(self.tokens) else rows.places()
        return self.tokens[places], self.step.features_at(places)

    def pass_over(self, rows: StepRows) -> None:
        """Count rows as read: their features are no longer needed."""
        self._unread_rows -= rows.num_rows

    def finish_features(self) -> None:
        """Release the features' memory if the copies of all rows have been issued."""
        if not self._unread_rows:
            self.step.features.finish()

    def drop_features(self) -> None:
        """Release the features' memory; unread rows are dropped."""
        self._unread_rows = 0
        self.finish_features()

    def admit(self, slots: np.ndarray) -> None:
        """Set the rows of the step's sequences at `slots` [S] as waiting."""
        counts = self.step.num_rows
        self.is_admitted = True
        self.rows_left = len(self.tokens)
        self._left = (np.arange(len(counts)), slots, counts.cumsum(), counts, self.step.num_drafts)

    def keep(self, chosen: np.ndarray) -> None:
        """Keep only the rows of the `chosen` [S] sequences; call before rows are taken."""
        self._left = tuple(column[chosen] for column in self._left)
        self.rows_left = int(self._left[3].sum())

    def forget(self, slot: int) -> int:
        """Drop the waiting rows of the sequence at `slot`, answer it as unknown, and return how many rows were
        dropped."""
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

    def take_rows(self, limit: int, table: SequenceTable) -> StepRows:
        """Take up to `limit` waiting rows, and count them as their sequences' accepted rows."""
        indices, slots, ends, counts, num_drafts = self._left
        num_rows = min(self.rows_left, limit)
        self.rows_left -= num_rows
        if self.rows_left:
            self.is_split = True
            sums = np.cumsum(counts)
            last = int(np.searchsorted(sums, limit))  # index of the last touched sequence
            beyond = int(sums[last]) - limit
            rest_counts = counts[last:].copy()
            rest_counts[0] = beyond
            rest = (indices[last:], slots[last:], ends[last:], rest_counts, num_drafts[last:])
            self._left = tuple(column[int(beyond == 0) :] for column in rest)
            indices, slots = indices[: last + 1], slots[: last + 1]
            ends, counts, num_drafts = (column[: last + 1].copy() for column in (ends, counts, num_drafts))
            ends[last] -= beyond
            counts[last] -= beyond
            num_drafts[last] *= beyond == 0
        first_rows = table.next_row[slots]
        table.next_row[slots] = first_rows + counts
        return StepRows(self, indices, slots, first_rows, ends, counts, num_drafts, num_rows)
