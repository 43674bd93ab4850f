"""Changes of the prefix cache as they are recorded, kept and told to routers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from smg_grpc_proto.generated import common_pb2

from draftwire.contract.errors import StalledClientError
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.api.kv_events import KvEventHub
from verifier_service.core.cache_events import (
    BlockRemoved,
    BlocksStored,
    CacheEvent,
    CacheEventLog,
    DeliverCacheEvents,
    wire_hash,
)
from verifier_service.engine.prefix_cache import PrefixCache


def tokens(first: int) -> list[int]:
    return list(range(first, first + BLOCK_SIZE))


def name(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


class Recorded:
    """A log and what it has delivered."""

    def __init__(self, log: CacheEventLog) -> None:
        self.events: list[CacheEvent] = []
        self._log = log
        log.start(self.events.extend)

    def take(self) -> list[CacheEvent]:
        self._log.flush()
        taken = list(self.events)
        self.events.clear()
        return taken


def stored(first: int, count: int = 1, parent: int | None = None) -> BlocksStored:
    """Blocks whose hashes and tokens count up from `first`."""
    ids = [token for number in range(count) for token in tokens(first + number)]
    return BlocksStored(parent, tuple(range(first, first + count)), tuple(ids), "")


def test_nothing_is_recorded_that_nobody_asked_for():
    log = CacheEventLog()
    log.stored(None, name(1), tokens(1), "")
    log.removed(name(1))
    recorded = Recorded(log)
    assert recorded.take() == []


def test_blocks_in_a_row_are_one_event():
    log = CacheEventLog()
    recorded = Recorded(log)
    log.stored(None, name(1), tokens(1), "")
    log.stored(name(1), name(2), tokens(2), "")
    log.stored(name(9), name(3), tokens(3), "s")
    log.removed(name(2))
    other = BlocksStored(9, (3,), tuple(tokens(3)), "s")
    assert recorded.take() == [stored(1, 2), other, BlockRemoved(2)]
    assert recorded.take() == []


def test_a_hash_on_the_wire_has_a_sign():
    assert wire_hash(b"\xff" * 16) == -1


def test_the_cache_tells_what_it_drops():
    cache = PrefixCache(4)
    recorded = Recorded(cache.events)
    blocks = cache.allocate(2) or []
    assert cache.publish(blocks[0], name(1))
    assert cache.publish(blocks[1], name(2))
    cache.release(blocks)
    assert cache.allocate(2) is not None  # one of them was free
    assert recorded.take() == [BlockRemoved(2)]  # the last of a sequence goes first
    assert cache.drop_unused() == 0
    assert recorded.take() == [BlockRemoved(1)]


def test_a_flush_leaves_blocks_in_use():
    cache = PrefixCache(4)
    blocks = cache.allocate(2) or []
    for number, block in enumerate(blocks):
        cache.publish(block, name(number))
    cache.release(blocks[1:])
    assert cache.drop_unused() == 1
    assert cache.take_known([name(0)], lambda _: True) == blocks[:1]
    assert cache.take_known([name(1)], lambda _: True) == []


def test_the_same_block_of_another_request_is_no_event():
    cache = PrefixCache(4)
    first, second = cache.allocate(2) or []
    assert cache.publish(first, name(1))
    assert not cache.publish(second, name(1))


class Player:
    """An engine that delivers what a test says."""

    def __init__(self, **limits: int) -> None:
        self.hub = KvEventHub(self._watch, **limits)
        self.num_watched = 0

    def _watch(self, deliver: DeliverCacheEvents) -> None:
        self.num_watched += 1
        self.deliver = deliver


async def batches(hub: KvEventHub, count: int, start: int = 0) -> list[common_pb2.KvEventBatch]:
    subscription = hub.subscribe(start)
    taken = [await anext(subscription) for _ in range(count)]
    await subscription.aclose()
    return taken


def hashes(read: Sequence[common_pb2.KvEventBatch]) -> list[int]:
    return [block.block_hash for batch in read for event in batch.events for block in event.stored.blocks]


def test_a_subscriber_gets_a_snapshot_and_then_changes():
    async def play() -> None:
        player = Player()
        subscription = player.hub.subscribe(0)
        first = await anext(subscription)
        assert (first.snapshot.count, first.snapshot.blocks) == (1, 0)
        assert first.events[0].HasField("cleared")
        player.deliver([stored(1, 2), BlockRemoved(2)])
        change = await anext(subscription)
        assert change.sequence_number == first.sequence_number + 1
        assert not change.HasField("snapshot")
        blocks = change.events[0].stored.blocks
        assert [list(block.token_ids) for block in blocks] == [tokens(1), tokens(2)]
        assert {block.block_size for block in blocks} == {BLOCK_SIZE}
        assert not change.events[0].stored.HasField("parent_block_hash")
        assert list(change.events[1].removed.block_hashes) == [2]
        await subscription.aclose()
        (later,) = await batches(player.hub, 1)
        assert hashes([later]) == [1]
        assert later.sequence_number == change.sequence_number
        assert player.num_watched == 1

    asyncio.run(play())


def test_who_comes_again_in_time_needs_no_snapshot():
    async def play() -> None:
        player = Player()
        (first,) = await batches(player.hub, 1)
        subscription = player.hub.subscribe(first.sequence_number + 1)
        waiting = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        player.deliver([stored(1)])
        assert not (await waiting).HasField("snapshot")
        await subscription.aclose()

    asyncio.run(play())


def test_a_snapshot_has_parents_before_children():
    async def play() -> None:
        player = Player(snapshot_blocks=2)
        await batches(player.hub, 1)
        player.deliver([stored(1, 3), BlockRemoved(1), stored(1)])  # the parent was stored anew, behind its child
        read = await batches(player.hub, 2)
        assert hashes(read) == [1, 2, 3]
        assert [(one.snapshot.index, one.snapshot.count, one.snapshot.blocks) for one in read] == [(0, 2, 3), (1, 2, 3)]
        assert read[1].events[0].stored.parent_block_hash == 2
        assert read[1].sequence_number == read[0].sequence_number + 1

    asyncio.run(play())


def test_changes_while_a_snapshot_is_sent_come_after_it():
    async def play() -> None:
        player = Player(snapshot_blocks=2)
        await batches(player.hub, 1)
        player.deliver([stored(1, 3)])
        subscription = player.hub.subscribe(0)
        read = [await anext(subscription)]
        player.deliver([BlockRemoved(3), stored(4)])
        read += [await anext(subscription) for _ in range(2)]
        assert hashes(read) == [1, 2, 3, 4]
        assert [one.HasField("snapshot") for one in read] == [True, True, False]
        first = read[0].sequence_number
        assert [one.sequence_number - first for one in read] == [0, 1, 2]
        await subscription.aclose()

    asyncio.run(play())


def test_a_subscriber_that_does_not_read_is_ended():
    async def play() -> None:
        player = Player(max_waiting=3)
        subscription = player.hub.subscribe(0)
        await anext(subscription)
        for number in range(5):
            player.deliver([stored(number)])
        with pytest.raises(StalledClientError, match="has not read 3 batches"):
            await anext(subscription)

    asyncio.run(play())
