"""Changes of the prefix cache, for routers that send a request to the server with its prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIRE_BYTES = 8


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks that can be found from now on."""

    parent: int | None  # hash of the block before the first; None at the beginning of a prompt
    hashes: tuple[int, ...]
    token_ids: tuple[int, ...]  # of all blocks, the same number each
    salt: str  # only requests with this cache salt find the blocks


@dataclass(frozen=True)
class BlockRemoved:
    """A block that can no longer be found."""

    block_hash: int


CacheEvent = BlocksStored | BlockRemoved
DeliverCacheEvents = Callable[[Sequence[CacheEvent]], object]


def wire_hash(block_hash: bytes) -> int:
    """Return a block's hash for routers: the first 8 bytes, signed."""
    return int.from_bytes(block_hash[:_WIRE_BYTES], "big", signed=True)


class CacheEventLog:
    """Collects events until they are delivered. It records nothing before `start`, to cost nothing when unused."""

    def __init__(self) -> None:
        self._deliver: DeliverCacheEvents | None = None
        self._events: list[CacheEvent] = []

    @property
    def is_recording(self) -> bool:
        """Return whether events are recorded."""
        return self._deliver is not None

    def start(self, deliver: DeliverCacheEvents) -> None:
        """Record events, which `flush` passes to `deliver`."""
        self._deliver = deliver

    def stored(self, parent: bytes | None, block_hash: bytes, token_ids: Sequence[int], salt: str) -> None:
        """Record a new block; a block that continues the last event is merged into it."""
        if self._deliver is None:
            return
        before = None if parent is None else wire_hash(parent)
        event = BlocksStored(before, (wire_hash(block_hash),), tuple(token_ids), salt)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.hashes[-1] == before:
            both = (*last.hashes, *event.hashes), (*last.token_ids, *event.token_ids)
            self._events[-1] = BlocksStored(last.parent, *both, last.salt)
        else:
            self._events.append(event)

    def removed(self, block_hash: bytes) -> None:
        """Record that a block can no longer be found."""
        if self._deliver is not None:
            self._events.append(BlockRemoved(wire_hash(block_hash)))

    def flush(self) -> None:
        """Deliver the recorded events."""
        if self._events and self._deliver is not None:
            events, self._events = self._events, []
            self._deliver(events)
