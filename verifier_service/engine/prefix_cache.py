"""The cache's blocks: their users, and full blocks that can be found by their tokens."""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from draftwire.model.block_pool import BlockPool
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.cache_events import CacheEventLog

_HASH_BYTES = 16


class PrefixCache:
    """Allocates blocks and counts their users; full blocks can be found by their tokens and all earlier tokens.

    An unused block that can be found stays until memory is needed; the least recently used block is freed first.
    Blocks shared by several requests are never written.

    Hashes are keyed with a secret of the process, so that no client can construct two prefixes with the same hash. A
    salt is part of the hashes: only requests with equal salts share blocks.

    Attributes:
        events: Changes of the blocks that can be found.
    """

    def __init__(self, num_blocks: int, *, is_enabled: bool = True) -> None:
        """If `is_enabled` is false, no block is ever found. Raise InvalidArgumentError without a block to allocate."""
        self.is_enabled = is_enabled
        self.events = CacheEventLog()
        self._pool = BlockPool(num_blocks)
        self._num_users = [0] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # blocks that can be found, longest unused first
        self._key = secrets.token_bytes(32)

    @property
    def num_free(self) -> int:
        """Return the number of unused blocks."""
        return self._pool.num_free + len(self._unused)

    @property
    def usage(self) -> float:
        """Return the share of the blocks in use, [0, 1]."""
        return 1 - self.num_free / (self._pool.num_blocks - 1)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], num_blocks: int, salt: str = "") -> None:
        """Append to `hashes`, the hashes of the first full blocks of `tokens`, until there are `num_blocks`."""
        root = blake2b(salt.encode(), digest_size=_HASH_BYTES, key=self._key).digest() if salt and not hashes else b""
        for start in range(len(hashes) * BLOCK_SIZE, num_blocks * BLOCK_SIZE, BLOCK_SIZE):
            parent = hashes[-1] if hashes else root
            own = array("i", tokens[start : start + BLOCK_SIZE]).tobytes()
            hashes.append(blake2b(parent + own, digest_size=_HASH_BYTES, key=self._key).digest())

    def take_known(self, hashes: Iterable[bytes], is_usable: Callable[[int], bool]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` that are known and usable, and count the caller as a
        user."""
        taken = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None or not is_usable(block):
                break
            self._num_users[block] += 1
            self._unused.pop(block, None)
            taken.append(block)
        return taken

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` unshared blocks, or None if fewer are free."""
        if count > self.num_free:
            return None
        while self._pool.num_free < count:
            self._drop_unused()
        taken = self._pool.allocate(count) or []
        for block in taken:
            self._num_users[block] = 1
        return taken

    def drop_unused(self) -> int:
        """Forget all unused blocks, and return how many used blocks can still be found."""
        while self._unused:
            self._drop_unused()
        return len(self._hashes)

    def _drop_unused(self) -> None:
        """Free the block that was unused for longest."""
        block, _ = self._unused.popitem(last=False)
        block_hash = self._hashes.pop(block)
        del self._blocks[block_hash]
        self._pool.release([block])
        self.events.removed(block_hash)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Publish a full block, which is no longer written; return whether no equal block could be found.

        Of equal blocks the last one is found: it was computed because the earlier ones were not usable.
        """
        if not self.is_enabled:
            return False
        old = self._blocks.get(block_hash)
        if old is not None:
            del self._hashes[old]
            if old in self._unused:
                del self._unused[old]
                self._pool.release([old])
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash
        return old is None

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublish the blocks in use, whose contents may be wrong."""
        for block in blocks:
            block_hash = self._hashes.pop(block, None)
            if block_hash is not None:
                del self._blocks[block_hash]
                self.events.removed(block_hash)

    def release(self, blocks: Sequence[int]) -> None:
        """Release a sequence's blocks, last block first, because a block is useless without the blocks before it."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._hashes:
                    self._unused[block] = None
                else:
                    self._pool.release([block])
