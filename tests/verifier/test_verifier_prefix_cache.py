"""The cache's blocks: one user or several, kept after use until their room is needed, found by what they hold."""

from __future__ import annotations

import pytest

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.engine.prefix_cache import PrefixCache

TOKENS = [7 * i % 50 for i in range(6 * BLOCK_SIZE)]


def hashes_of(cache: PrefixCache, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, tokens, len(tokens) // BLOCK_SIZE)
    return hashes


def used_up(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that has come, filled them and gone."""
    hashes = hashes_of(cache, tokens)
    blocks = cache.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        cache.publish(block, block_hash)
    cache.release(blocks)
    return blocks


def known(cache: PrefixCache, hashes: list[bytes]) -> list[int]:
    """Blocks found by a request to which all are of use."""
    return cache.take_known(hashes, lambda _: True)


# Hashes.


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


def test_the_longest_known_prefix_is_found():
    cache = PrefixCache(20)
    blocks = used_up(cache, TOKENS[: 3 * BLOCK_SIZE])
    assert known(cache, hashes_of(cache, TOKENS)) == blocks
    other = [*TOKENS[: 2 * BLOCK_SIZE], *reversed(TOKENS[2 * BLOCK_SIZE :])]
    assert known(cache, hashes_of(cache, other)) == blocks[:2]
    assert known(cache, hashes_of(cache, TOKENS[1:])) == []


def test_blocks_behind_an_unknown_one_are_not_found():
    cache = PrefixCache(20)
    hashes = hashes_of(cache, TOKENS)
    blocks = cache.allocate(3) or []
    cache.publish(blocks[0], hashes[0])
    cache.publish(blocks[2], hashes[2])
    assert known(cache, hashes) == blocks[:1]


def test_a_prefix_ends_before_a_block_that_is_of_no_use():
    cache = PrefixCache(20)
    blocks = used_up(cache, TOKENS)
    hashes = hashes_of(cache, TOKENS)
    assert cache.take_known(hashes, lambda block: block != blocks[2]) == blocks[:2]
    assert cache.num_free == 17


def test_of_two_equal_blocks_the_last_is_found_the_other_free():
    cache = PrefixCache(20)
    first = used_up(cache, TOKENS[:BLOCK_SIZE])
    second = used_up(cache, TOKENS[:BLOCK_SIZE])
    assert first != second
    assert known(cache, hashes_of(cache, TOKENS)) == second
    assert cache.num_free == 18
    assert first[0] in (cache.allocate(18) or [])


def test_a_block_in_use_that_another_replaces_goes_with_its_user():
    cache = PrefixCache(20)
    hashes = hashes_of(cache, TOKENS[:BLOCK_SIZE])
    first, second = cache.allocate(1) or [], cache.allocate(1) or []
    cache.publish(first[0], hashes[0])
    cache.publish(second[0], hashes[0])
    cache.release(first)
    assert known(cache, hashes) == second
    assert cache.num_free == 18


def test_what_is_withdrawn_is_not_found():
    cache = PrefixCache(20)
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
    cache.release(known(cache, hashes_of(cache, old)))  # used again, so the others are older now
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
