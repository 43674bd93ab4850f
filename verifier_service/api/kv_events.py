"""Events of SubscribeKvEvents: a snapshot of the prefix cache's blocks for each subscriber, then every change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from draftwire.contract.errors import StalledClientError
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.cache_events import BlockRemoved, BlocksStored, CacheEvent, DeliverCacheEvents

# Maximum number of batches that wait for a subscriber. Then the stream ends, and the subscriber can subscribe again
# for a snapshot.
MAX_WAITING = 4096
# Blocks in one message of a snapshot.
SNAPSHOT_BLOCKS = 1024


class KvEventHub:
    """Tracks all blocks that can be found and sends their changes to subscribers. Used on one event loop.

    The first sequence number is the time in microseconds, so that numbers of different processes differ.
    """

    def __init__(
        self,
        watch: Callable[[DeliverCacheEvents], None],
        max_waiting: int = MAX_WAITING,
        snapshot_blocks: int = SNAPSHOT_BLOCKS,
    ) -> None:
        """`watch` is called at the first subscription, with the function that takes the events."""
        self._max_waiting = max_waiting
        self._snapshot_blocks = snapshot_blocks
        self._watch = watch
        self._is_watching = False
        self._blocks: dict[int, BlocksStored] = {}  # one block each, by hash
        self._subscribers: dict[asyncio.Queue[common_pb2.KvEventBatch | None], None] = {}
        self._sequence = time.time_ns() // 1000
        self._num_events = 0

    async def subscribe(self, start_sequence: int) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yield batches: a snapshot first, unless `start_sequence` is the number of the next batch.

        Raises:
            StalledClientError: If `max_waiting` batches wait for the subscriber.
        """
        waiting: asyncio.Queue[common_pb2.KvEventBatch | None] = asyncio.Queue()
        snapshot = iter(()) if start_sequence == self._sequence + 1 else self._snapshot()
        self._subscribers[waiting] = None
        try:
            if not self._is_watching:
                self._is_watching = True
                self._watch(self._take)
            for batch in snapshot:
                yield batch
            while (following := await waiting.get()) is not None:
                yield following
        finally:
            self._subscribers.pop(waiting, None)
        raise StalledClientError(f"the subscriber has not read {self._max_waiting} batches of events")

    def _take(self, events: Sequence[CacheEvent]) -> None:
        self._sequence += 1
        batch = common_pb2.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), dp_rank=0)
        for event in events:
            self._num_events += 1
            written = batch.events.add(event_id=self._num_events)
            if isinstance(event, BlockRemoved):
                self._blocks.pop(event.block_hash, None)
                tier = common_pb2.KV_CACHE_TIER_DEVICE
                written.removed.CopyFrom(common_pb2.KvBlocksRemoved(block_hashes=[event.block_hash], tier=tier))
            else:
                self._blocks.update((one.hashes[0], one) for one in _split(event))
                written.stored.CopyFrom(_stored(event))
        for waiting in list(self._subscribers):
            if waiting.qsize() < self._max_waiting:
                waiting.put_nowait(batch)
            else:
                del self._subscribers[waiting]
                while not waiting.empty():
                    waiting.get_nowait()
                waiting.put_nowait(None)

    def _snapshot(self) -> Iterator[common_pb2.KvEventBatch]:
        """Return the batches of the present state, each made when it is taken: a large cache takes a while."""
        blocks, size, last = self._parents_first(), self._snapshot_blocks, self._sequence
        count = max(1, -(-len(blocks) // size))
        return (_chunk(blocks, index, count, size, last - count + 1 + index) for index in range(count))

    def _parents_first(self) -> list[BlocksStored]:
        """Return all blocks, each after its parent if the parent is known."""
        ordered: dict[int, BlocksStored] = {}
        for block in self._blocks.values():
            path = [block]
            while (parent := path[-1].parent) is not None and parent in self._blocks and parent not in ordered:
                path.append(self._blocks[parent])
            for one in reversed(path):
                ordered.setdefault(one.hashes[0], one)
        return list(ordered.values())


def _chunk(blocks: list[BlocksStored], index: int, count: int, size: int, sequence: int) -> common_pb2.KvEventBatch:
    """Return batch `index` of `count` batches of `size` blocks."""
    chunk = common_pb2.KvSnapshotChunk(index=index, count=count, blocks=len(blocks))
    batch = common_pb2.KvEventBatch(sequence_number=sequence, timestamp=time.time(), dp_rank=0, snapshot=chunk)
    if index == 0:
        batch.events.add().cleared.SetInParent()
    for block in blocks[index * size : (index + 1) * size]:
        batch.events.add(stored=_stored(block))
    return batch


def _split(event: BlocksStored) -> Iterator[BlocksStored]:
    """Yield one event for each block of an event."""
    parent = event.parent
    for index, block_hash in enumerate(event.hashes):
        tokens = event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        yield BlocksStored(parent, (block_hash,), tokens, event.salt)
        parent = block_hash


def _stored(event: BlocksStored) -> common_pb2.KvBlocksStored:
    stored = common_pb2.KvBlocksStored(tier=common_pb2.KV_CACHE_TIER_DEVICE)
    if event.parent is not None:
        stored.parent_block_hash = event.parent
    if event.salt:
        stored.cache_salt = event.salt
    for one in _split(event):
        stored.blocks.add(block_hash=one.hashes[0], token_ids=one.token_ids, block_size=BLOCK_SIZE)
    return stored
