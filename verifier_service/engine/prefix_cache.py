"""The cache's blocks: who uses them, and which are found again by the tokens that they hold."""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from draftwire.model.block_pool import BlockPool
from draftwire.model.kv_cache import BLOCK_SIZE

_HASH_BYTES = 16


class PrefixCache:
    """Hands out blocks and counts their users; full blocks can be found by their own and all earlier tokens.

    A block that nobody uses and that can be found is kept until its room is needed, the least recently used one goes
    first. Blocks that several requests use hold rows that all of them have computed, and are never written.

    Hashes are keyed with a secret of the process, so that nobody can prepare two prefixes with the same hash. A salt is
    part of all hashes of its tokens: requests share blocks only with requests of the same salt, or of none as they.
    """

    def __init__(self, num_blocks: int, *, is_enabled: bool = True) -> None:
        """Where it is not enabled, no block is ever found.

        Raises
        ------
        InvalidArgumentError
            When there is not even one block to hand out.
        """
        self.is_enabled = is_enabled
        self._pool = BlockPool(num_blocks)
        self._num_users = [0] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # blocks that can be found, longest unused first
        self._key = secrets.token_bytes(32)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self._pool.num_free + len(self._unused)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody uses, [0, 1]."""
        return 1 - self.num_free / (self._pool.num_blocks - 1)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], num_blocks: int, salt: str = "") -> None:
        """Append to `hashes`, those of the first full blocks of `tokens`, until there are `num_blocks`."""
        root = blake2b(salt.encode(), digest_size=_HASH_BYTES, key=self._key).digest() if salt and not hashes else b""
        for start in range(len(hashes) * BLOCK_SIZE, num_blocks * BLOCK_SIZE, BLOCK_SIZE):
            parent = hashes[-1] if hashes else root
            own = array("i", tokens[start : start + BLOCK_SIZE]).tobytes()
            hashes.append(blake2b(parent + own, digest_size=_HASH_BYTES, key=self._key).digest())

    def take_known(self, hashes: Iterable[bytes], is_usable: Callable[[int], bool]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that are known and usable, with one more user, the caller."""
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
        """`count` blocks for the caller alone, or None when fewer are free."""
        if count > self.num_free:
            return None
        while self._pool.num_free < count:
            block, _ = self._unused.popitem(last=False)
            del self._blocks[self._hashes.pop(block)]
            self._pool.release([block])
        taken = self._pool.allocate(count) or []
        for block in taken:
            self._num_users[block] = 1
        return taken

    def publish(self, block: int, block_hash: bytes) -> None:
        """A block of the caller is full and will not be written any more.

        Of several alike the last is found: it was computed because the others were of no use to its request.
        """
        if not self.is_enabled:
            return
        old = self._blocks.get(block_hash)
        if old is not None:
            del self._hashes[old]
            if old in self._unused:
                del self._unused[old]
                self._pool.release([old])
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash

    def withdraw(self, blocks: Iterable[int]) -> None:
        """What blocks in use hold is not to be trusted: they are not found any more."""
        for block in blocks:
            block_hash = self._hashes.pop(block, None)
            if block_hash is not None:
                del self._blocks[block_hash]

    def release(self, blocks: Sequence[int]) -> None:
        """The caller uses a sequence's blocks no more. The last goes first, for it is of no use without the others."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._hashes:
                    self._unused[block] = None
                else:
                    self._pool.release([block])
