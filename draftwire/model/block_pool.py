"""The free blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.kv_cache import BLOCK_SIZE


class BlockPool:
    """Hands out block ids; the only owner of the free list.

    Raises:
        InvalidArgumentError: If `num_blocks` is below 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidArgumentError("num_blocks", num_blocks, "must be at least 2; block 0 is padding")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Return the number of blocks not in use."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Return the share of the blocks in use, [0, 1]."""
        return 1 - self.num_free / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` block ids, or None if fewer are free. Ids that were never used before are consecutive."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks; blocks freed last to first are allocated again in order."""
        self._free.extend(blocks)


def blocks_for(num_rows: int) -> int:
    """Return the number of blocks for `num_rows` rows."""
    return -(-num_rows // BLOCK_SIZE)
