"""State of one sequence in the drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwire.kv_cache import BLOCK_SIZE, BlockPool, blocks_for


@dataclass(eq=False)
class Sequence:
    """A request's noise and its rows in the head's cache; row of position p is cached at place p - first_row."""

    sequence_id: int
    temperature: float
    proposal_key: int
    first_row: int
    next_row: int  # position of the first row that is not true: the number of true rows counted from position 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """True rows in the cache."""
        return self.next_row - self.first_row

    def reserve(self, num_rows: int, pool: BlockPool) -> bool:
        """Makes room for `num_rows` rows after the true ones, if the pool has the blocks."""
        missing = blocks_for(self.num_cached + num_rows) - len(self.blocks)
        if missing > 0:
            blocks = pool.allocate(missing)
            if blocks is None:
                return False
            self.blocks.extend(blocks)
        return True

    def reserve_drafts(self, num_drafts: int, pool: BlockPool, max_model_len: int) -> int:
        """Makes room for the speculative rows of up to `num_drafts` drafts; the number that there is room for.

        The first draft needs no row of its own: the last true row predicts it.
        """
        num_drafts = min(num_drafts, max_model_len - self.next_row + 1)
        if not self.reserve(num_drafts - 1, pool):
            num_drafts = min(num_drafts, len(self.blocks) * BLOCK_SIZE - self.num_cached + 1)
        return num_drafts
