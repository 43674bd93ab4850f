"""The cache's blocks: their users, lookup by tokens, and events of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from smg_grpc_proto.generated import common_pb2

from draftwire.contract.errors import InvalidArgumentError, StalledClientError
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

TOKENS = [7 * i % 50 for i in range(6 * BLOCK_SIZE)]


def hashes_of(cache: PrefixCache, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, tokens, len(tokens) // BLOCK_SIZE)
    return hashes


def used_up(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Return the blocks of a sequence that has filled and released them."""
    hashes = hashes_of(cache, tokens)
    blocks = cache.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        cache.publish(block, block_hash)
    cache.release(blocks)
    return blocks


def known(cache: PrefixCache, hashes: list[bytes]) -> list[int]:
    """Return the blocks found by a request that can use every block."""
    return cache.take_known(hashes, lambda _: True)


# Hashes.


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(20)


def test_equal_hashes_mean_equal_tokens_from_the_beginning_on():
    cache = PrefixCache(8)
    hashes = hashes_of(cache, TOKENS)
    assert hashes_of(cache, list(TOKENS)) == hashes
    assert len(set(hashes)) == 6
    for changed in (0, BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE - 1):
        other = hashes_of(cache, [*TOKENS[:changed], TOKENS[changed] + 1, *TOKENS[changed + 1 :]])
        equal = [a == b for a, b in zip(hashes, other, strict=True)]
        assert equal == [(i + 1) * BLOCK_SIZE <= changed for i in range(6)]


def test_a_token_has_one_place_in_its_block():
    cache = PrefixCache(8)
    assert hashes_of(cache, [1, 256, *TOKENS][:BLOCK_SIZE]) != hashes_of(cache, [256, 1, *TOKENS][:BLOCK_SIZE])


def test_hashes_are_extended_by_the_blocks_that_are_missing():
    cache = PrefixCache(8)
    hashes: list[bytes] = []
    for count in (1, 1, 3, 2, 6):
        cache.extend_hashes(hashes, TOKENS, count)
    assert hashes == hashes_of(cache, TOKENS)


def test_a_salt_separates_all_blocks_of_its_sequences():
    cache = PrefixCache(16)
    by_salt = {}
    for salt in ("", "a", "b"):
        whole: list[bytes] = []
        cache.extend_hashes(whole, TOKENS, 6, salt)
        pieces: list[bytes] = []
        for count in (1, 4, 6):
            cache.extend_hashes(pieces, TOKENS, count, salt)
        assert pieces == whole
        by_salt[salt] = whole
    assert by_salt[""] == hashes_of(cache, TOKENS)
    assert len({block_hash for hashes in by_salt.values() for block_hash in hashes}) == 18


def test_nobody_can_compute_the_hashes_of_another_process():
    assert hashes_of(PrefixCache(8), TOKENS)[0] != hashes_of(PrefixCache(8), TOKENS)[0]


# Finding.


def test_the_longest_known_prefix_is_found(cache):
    blocks = used_up(cache, TOKENS[: 3 * BLOCK_SIZE])
    assert known(cache, hashes_of(cache, TOKENS)) == blocks
    other = [*TOKENS[: 2 * BLOCK_SIZE], *reversed(TOKENS[2 * BLOCK_SIZE :])]
    assert known(cache, hashes_of(cache, other)) == blocks[:2]
    assert known(cache, hashes_of(cache, TOKENS[1:])) == []


def test_blocks_behind_an_unknown_one_are_not_found(cache):
    hashes = hashes_of(cache, TOKENS)
    blocks = cache.allocate(3) or []
    cache.publish(blocks[0], hashes[0])
    cache.publish(blocks[2], hashes[2])
    assert known(cache, hashes) == blocks[:1]


def test_a_prefix_ends_before_a_block_that_is_of_no_use(cache):
    blocks = used_up(cache, TOKENS)
    hashes = hashes_of(cache, TOKENS)
    assert cache.take_known(hashes, lambda block: block != blocks[2]) == blocks[:2]
    assert cache.num_free == 17


def test_of_two_equal_blocks_the_last_is_found_the_other_free(cache):
    first = used_up(cache, TOKENS[:BLOCK_SIZE])
    second = used_up(cache, TOKENS[:BLOCK_SIZE])
    assert first != second
    assert known(cache, hashes_of(cache, TOKENS)) == second
    assert cache.num_free == 18
    assert first[0] in (cache.allocate(18) or [])


def test_a_block_in_use_that_another_replaces_goes_with_its_user(cache):
    hashes = hashes_of(cache, TOKENS[:BLOCK_SIZE])
    first, second = cache.allocate(1) or [], cache.allocate(1) or []
    cache.publish(first[0], hashes[0])
    cache.publish(second[0], hashes[0])
    cache.release(first)
    assert known(cache, hashes) == second
    assert cache.num_free == 18


def test_what_is_withdrawn_is_not_found(cache):
    used_up(cache, TOKENS)
    users = known(cache, hashes_of(cache, TOKENS))
    cache.withdraw(users[2:])
    assert known(cache, hashes_of(cache, TOKENS)) == users[:2]


def test_nothing_is_found_where_finding_is_off():
    cache = PrefixCache(20, is_enabled=False)
    used_up(cache, TOKENS)
    assert known(cache, hashes_of(cache, TOKENS)) == []


# Users.


def test_a_block_is_free_when_its_last_user_has_gone():
    cache = PrefixCache(7)
    blocks = used_up(cache, TOKENS[: 2 * BLOCK_SIZE])
    hashes = hashes_of(cache, TOKENS[: 2 * BLOCK_SIZE])
    first, second = known(cache, hashes), known(cache, hashes)
    assert (first, second, cache.num_free) == (blocks, blocks, 4)
    cache.release(first)
    assert cache.num_free == 4
    assert cache.usage == pytest.approx(2 / 6)
    assert set(cache.allocate(4) or []).isdisjoint(blocks)
    cache.release(second)
    assert cache.num_free == 2


def test_blocks_that_cannot_be_found_are_evicted_first():
    cache = PrefixCache(7)
    kept = used_up(cache, TOKENS[: 2 * BLOCK_SIZE])
    other = cache.allocate(4) or []
    assert set(other).isdisjoint(kept)
    assert known(cache, hashes_of(cache, TOKENS)) == kept


def test_the_blocks_longest_unused_are_evicted_tails_first():
    cache = PrefixCache(7)
    old, new = TOKENS[: 3 * BLOCK_SIZE], TOKENS[3 * BLOCK_SIZE :]
    old_blocks, new_blocks = used_up(cache, old), used_up(cache, new)
    assert cache.allocate(1) == old_blocks[2:]
    cache.release(known(cache, hashes_of(cache, old)))  # used again, so the other blocks are older
    assert cache.allocate(4) is not None
    assert known(cache, hashes_of(cache, old)) == old_blocks[:1]
    assert known(cache, hashes_of(cache, new)) == []
    assert len(new_blocks) == 3


def test_too_many_blocks_are_refused_and_nothing_is_lost():
    cache = PrefixCache(7)
    used_up(cache, TOKENS[: 2 * BLOCK_SIZE])
    assert cache.allocate(7) is None
    assert len(known(cache, hashes_of(cache, TOKENS))) == 2
    assert cache.allocate(5) is None
    assert len(cache.allocate(4) or []) == 4


def test_block_0_is_never_handed_out():
    cache = PrefixCache(7)
    assert sorted(cache.allocate(6) or []) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidArgumentError, match="num_blocks = 1: must be at least 2"):
        PrefixCache(1)


def tokens(first: int) -> list[int]:
    return list(range(first, first + BLOCK_SIZE))


def name(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


class Recorded:
    """The delivered events of a log."""

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
    """Return an event of blocks whose hashes and tokens count up from `first`."""
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
    assert cache.allocate(2) is not None  # one block was never used
    assert recorded.take() == [BlockRemoved(2)]  # the last block of a sequence is evicted first
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
    """An engine whose events come from the test."""

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
        player.deliver([stored(1, 3), BlockRemoved(1), stored(1)])  # the parent is stored again, after its child
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
