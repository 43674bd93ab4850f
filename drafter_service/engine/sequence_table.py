"""State of all open sequences as a structure of arrays, so that a batch needs no loop over sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafter_service.draft_loop.inputs import num_new_blocks
from drafter_service.engine.step import OpenedSequence
from drafter_service.limits import EngineLimits
from draftwire.model.block_pool import BlockPool, blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE


class SequenceTable:
    """Sequences by slot, 0 .. max_num_seqs - 1; the row of position p is cached at place p - first_row.

    Attributes:
        first_row: [max_num_seqs] int64, position of the first row.
        next_row: [max_num_seqs + 1] int64, position after the last accepted row. The last entry is -1, which no first
            row equals: slot -1 is an unknown sequence.
        temperature, proposal_key: [max_num_seqs] float32 and int64.
        end_row: [max_num_seqs] int64, end of the positions for which a sequence's blocks and context have room.
        blocks: [max_num_seqs, W] int32, ids of each sequence's blocks; 0 beyond its `num_blocks`. W is enough for a
            step's new blocks (`loop_inputs.num_new_blocks`) to be read from any block of the longest sequence on.
    """

    def __init__(self, limits: EngineLimits, pool: BlockPool, block_rows: int = 0) -> None:
        """`block_rows` as in `HeadSpec`."""
        self._pool = pool
        self._block_rows = block_rows
        self._max_num_seqs = max_num_seqs = limits.max_num_seqs
        self._max_model_len = limits.max_model_len
        self._free = list(range(max_num_seqs - 1, -1, -1))
        k = limits.max_num_speculative_tokens
        width = blocks_for(limits.max_model_len) + num_new_blocks(k + 1 + max(block_rows, k - 1))
        self.first_row = np.zeros(max_num_seqs, np.int64)
        self.next_row = np.zeros(max_num_seqs + 1, np.int64)
        self.next_row[-1] = -1
        self.end_row = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.proposal_key = np.zeros(max_num_seqs, np.int64)
        self.blocks = np.zeros((max_num_seqs, width), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return self._max_num_seqs - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self._pool.num_free

    def open(self, new: OpenedSequence) -> int | None:
        """Open a sequence and return its slot; None if all slots are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.first_row[slot] = self.next_row[slot] = self.end_row[slot] = new.first_row
        self.temperature[slot] = new.temperature
        self.proposal_key[slot] = new.proposal_key
        return slot

    def close(self, slot: int) -> None:
        """Free a slot and its blocks."""
        count = self.num_blocks[slot]
        self._pool.release(self.blocks[slot, :count].tolist())
        self.blocks[slot, :count] = 0
        self.num_blocks[slot] = 0
        self._free.append(slot)

    def blocks_of(self, slot: int) -> Any:
        """Return the blocks of a sequence, [n] int32."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def num_missing_blocks(self, slot: int, num_rows: int) -> int:
        """Return how many more blocks a sequence needs for `num_rows` rows after its accepted rows."""
        end = self.next_row.item(slot) + num_rows
        return max(0, blocks_for(end - self.first_row.item(slot)) - self.num_blocks.item(slot))

    def has_room(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return whether each sequence has room for rows before the position `ends`; [n] bool."""
        return ends <= self.end_row[slots]

    def reserve(self, slot: int, num_rows: int) -> bool:
        """Reserve room for `num_rows` rows after a sequence's accepted rows; return False without enough room."""
        if self.next_row.item(slot) + num_rows > self._max_model_len:
            return False
        missing = self.num_missing_blocks(slot, num_rows)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            held = self.num_blocks.item(slot)
            self.blocks[slot, held : held + missing] = blocks
            self.num_blocks[slot] = held + missing
            room = self.first_row.item(slot) + (held + missing) * BLOCK_SIZE
            self.end_row[slot] = min(room, self._max_model_len)
        return True

    def reserve_drafts(
        self, slots: np.ndarray, num_drafts: np.ndarray, rows_before: np.ndarray | int = 0
    ) -> np.ndarray:
        """Reserve room for the rows of up to `num_drafts` drafts; return the number of drafts with room, int64 [n].

        Args:
            num_drafts: int64 [n], at least 1 each.
            rows_before: Rows between a sequence's accepted rows and those of its drafts.
        """
        behind = rows_before + self._rows_behind(num_drafts)
        has_room = self.has_room(slots, self.next_row[slots] + behind)
        if np.count_nonzero(has_room) == len(slots):
            return num_drafts
        self._extend(slots[~has_room], behind[~has_room])
        left = self.end_row[slots] - self.next_row[slots] - rows_before
        if self._block_rows:
            return np.where(left >= self._block_rows, num_drafts, 0)
        # The first draft needs no row: the last accepted row predicts it.
        return np.minimum(num_drafts, left + 1)

    def reserve_next_step(self, slots: np.ndarray, num_drafts: np.ndarray) -> None:
        """Reserve room for a next step that accepts and wants as many drafts; see `reserve_ahead`."""
        self.reserve_ahead(slots, num_drafts + 1 + self._rows_behind(num_drafts))

    def has_draft_room(self, slots: np.ndarray, first_rows: np.ndarray, counts: np.ndarray, num_drafts: int) -> bool:
        """Return whether all sequences have room for accepted rows from `first_rows` on and for their drafts.

        Missing blocks are reserved as by `reserve_ahead`.
        """
        num_rows = counts + self._rows_behind(np.full(len(slots), num_drafts))
        self.reserve_ahead(slots, num_rows)
        return bool(self.has_room(slots, first_rows + num_rows).all())

    def _rows_behind(self, num_drafts: np.ndarray) -> np.ndarray:
        """Return `HeadSpec.rows_behind` of several sequences."""
        return np.full(len(num_drafts), self._block_rows) if self._block_rows else num_drafts - 1

    def reserve_ahead(self, slots: np.ndarray, num_rows: np.ndarray) -> None:
        """Reserve room for `num_rows` rows after the sequences' accepted rows; one block per open sequence stays free.

        The scheduler takes a step with room without a loop over its sequences.
        """
        end_rows = self.end_row[slots]
        lacks = (self.next_row[slots] + num_rows > end_rows) & (end_rows < self._max_model_len)
        if np.count_nonzero(lacks):
            self._extend(slots[lacks], num_rows[lacks], spare=self.num_open)

    def _extend(self, slots: np.ndarray, num_rows: np.ndarray, spare: int = 0) -> None:
        """Give sequences blocks for `num_rows` rows after their accepted rows, in order; `spare` blocks stay free."""
        first_rows, held = self.first_row[slots], self.num_blocks[slots]
        ends = np.minimum(self.next_row[slots] + num_rows, self._max_model_len)
        missing = -(-(ends - first_rows) // BLOCK_SIZE) - held
        missing[missing.cumsum() > self._pool.num_free - spare] = 0
        total = int(missing.sum())
        columns = (held - (missing.cumsum() - missing)).repeat(missing) + np.arange(total)
        blocks = self._pool.allocate(total)
        assert blocks is not None  # enough blocks are free
        self.blocks[slots.repeat(missing), columns] = blocks
        self.num_blocks[slots] = held + missing
        self.end_row[slots] = np.minimum(first_rows + (held + missing) * BLOCK_SIZE, self._max_model_len)
