"""Attention over the paged cache against torch's own over each sequence alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftwire.model.block_pool import BlockPool, blocks_for
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows
from draftwire_kernels import paged_attention

HEAD_SIZE = 16
SCALE = 0.3
CPU = torch.device("cpu")


class Sequence:
    """A sequence whose rows are given to the cache bit by bit, and all of them at once to torch."""

    def __init__(self, pool: BlockPool, length: int, heads: int, kv_heads: int) -> None:
        blocks = pool.allocate(blocks_for(length))
        assert blocks is not None
        self.blocks = blocks
        self.q = torch.randn(length, heads, HEAD_SIZE)
        self.k = torch.randn(length, kv_heads, HEAD_SIZE)
        self.v = torch.randn(length, kv_heads, HEAD_SIZE)

    def expected(self, start: int, count: int, window: int | None, softcap: float | None) -> torch.Tensor:
        length, repeats = start + count, self.q.shape[1] // self.k.shape[1]
        k, v = (x[:length].repeat_interleave(repeats, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = SCALE * self.q[start:length].transpose(0, 1) @ k.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query, key = torch.arange(start, length)[:, None], torch.arange(length)
        seen = key <= query if window is None else (key <= query) & (key > query - window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)


def attend(cache: KVCache, rows: list[tuple[Sequence, int, int]], window=None, softcap=None) -> torch.Tensor:
    """One step over rows start .. start + count - 1 of each sequence."""
    q, k, v = (
        torch.cat([getattr(sequence, name)[start : start + count] for sequence, start, count in rows]) for name in "qkv"
    )
    batch = RaggedBatch([SequenceRows(sequence.blocks, start, count) for sequence, start, count in rows], CPU)
    return paged_attention(q, k, v, cache.keys[0], cache.values[0], batch, scale=SCALE, window=window, softcap=softcap)


def new_cache(kv_heads: int, num_blocks: int = 40) -> KVCache:
    return KVCache([(kv_heads, HEAD_SIZE, HEAD_SIZE)], num_blocks, torch.float32, CPU)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 17])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_ragged_batch_is_what_each_sequence_gives_alone(heads, kv_heads, window, softcap):
    torch.manual_seed(0)
    pool, cache = BlockPool(40), new_cache(kv_heads)
    sequences = [Sequence(pool, length, heads, kv_heads) for length in (50, 3, 33, 17, 64)]
    done = [0] * len(sequences)
    # Prompts in pieces, single rows and rows with drafts, in one batch; a sequence may sit a step out.
    for counts in ((16, 2, 1, 9, 30), (20, 1, 5, 0, 1), (1, 0, 4, 1, 33), (8, 0, 5, 5, 0)):
        rows = [(s, start, count) for s, start, count in zip(sequences, done, counts, strict=True) if count]
        out = attend(cache, rows, window, softcap)
        expected = torch.cat([s.expected(start, count, window, softcap) for s, start, count in rows])
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        done = [start + count for start, count in zip(done, counts, strict=True)]


def test_rows_written_again_after_a_roll_back_replace_the_old():
    torch.manual_seed(1)
    pool, cache = BlockPool(40), new_cache(2)
    sequence, other = Sequence(pool, 40, 4, 2), Sequence(pool, 40, 4, 2)
    attend(cache, [(sequence, 0, 20), (other, 0, 14)])
    attend(cache, [(sequence, 20, 8), (other, 14, 3)])  # one token and seven drafts, five of them refused
    for tensor in (sequence.q, sequence.k, sequence.v):
        tensor[23:] = torch.randn_like(tensor[23:])
    out = attend(cache, [(sequence, 23, 4), (other, 17, 2)])
    expected = [sequence.expected(23, 4, None, None), other.expected(17, 2, None, None)]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_blocks_given_back_are_used_again_without_a_trace():
    torch.manual_seed(2)
    pool, cache = BlockPool(4), new_cache(2, num_blocks=4)
    old = Sequence(pool, 48, 4, 2)
    attend(cache, [(old, 0, 48)])
    pool.release(old.blocks)
    new = Sequence(pool, 40, 4, 2)
    assert set(new.blocks) <= set(old.blocks)
    torch.testing.assert_close(attend(cache, [(new, 0, 40)]), new.expected(0, 40, None, None), rtol=1e-5, atol=1e-5)


def test_attention_is_torch_s_own():
    """The reference of this file, once, against scaled_dot_product_attention."""
    torch.manual_seed(3)
    sequence = Sequence(BlockPool(40), 21, 4, 2)
    q, k, v = (x.transpose(0, 1)[None] for x in (sequence.q, sequence.k, sequence.v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(sequence.expected(0, 21, None, None), expected, rtol=1e-5, atol=1e-5)


def test_pool_hands_out_every_block_but_the_first_once():
    pool = BlockPool(5)
    first, second = pool.allocate(3), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.usage == 1
    pool.release(first)
    assert (pool.num_free, pool.usage) == (3, 0.25)
