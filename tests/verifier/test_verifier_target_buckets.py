"""Sizes of batch that graphs are captured for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from draftwire.model.batch_sizes import row_counts
from draftwire.model.kv_cache import BatchBuffers, RaggedBatch
from verifier_service.target.graph_sizes import Bucket, Buckets, sequence_counts


@pytest.mark.parametrize("most", [1, 2, 5, 16, 63, 64, 65, 100, 256, 4096])
def test_numbers_of_sequences_rise_to_the_most(most):
    counts = sequence_counts(most)
    assert counts[0] == 1
    assert counts[-1] == most
    assert counts == sorted(set(counts))


def test_padding_adds_little_to_a_large_batch():
    counts = sequence_counts(4096)
    for below, count in pairwise(counts):
        fewest = below + 1
        assert (count - fewest) / fewest <= (1 / 2 if below < 64 else 1 / 8)
    assert len(counts) < 80


@pytest.mark.parametrize("most", [2, 8, 63, 64, 65, 100, 256, 762, 832, 8512])
def test_row_counts_rise_to_the_most_and_padding_adds_little(most):
    counts = row_counts(most)
    assert counts[-1] == most
    assert counts == sorted(set(counts))
    assert counts[0] <= 64
    for below, count in pairwise(counts):
        assert count - (below + 1) < max(32, (below + 1) / 8)
    assert len(counts) < 60


@pytest.mark.parametrize(
    ("num_sequences", "num_rows", "max_rows", "bucket"),
    [
        (1, 1, 1, Bucket(1, 1, 2, 2)),
        (1, 2, 2, Bucket(1, 5, 5, 5)),
        (1, 5, 5, Bucket(1, 5, 5, 5)),
        (5, 5, 1, Bucket(6, 1, 6, 6)),
        (8, 9, 2, Bucket(8, 5, 40, 40)),
        (9, 13, 5, Bucket(12, 5, 24, 24)),
        (9, 25, 4, Bucket(12, 5, 36, 36)),
        (9, 36, 4, Bucket(12, 5, 36, 36)),
        (9, 37, 5, Bucket(12, 5, 60, 60)),
        (33, 165, 5, Bucket(40, 5, 200, 200)),
        (50, 50, 1, Bucket(50, 1, 50, 50)),
        (50, 51, 2, Bucket(50, 5, 100, 100)),
        (51, 51, 1, None),
        (1, 6, 6, Bucket(50, 64, 64, 64)),
        (50, 55, 6, Bucket(50, 64, 64, 64)),
        (1, 65, 65, Bucket(50, 96, 96, 96)),
        (3, 250, 240, Bucket(50, 256, 256, 250)),
        (50, 749, 506, Bucket(50, 762, 762, 250)),
        (50, 763, 513, None),
    ],
)
def test_a_step_is_padded_to_the_next_bucket(num_sequences, num_rows, max_rows, bucket):
    buckets = Buckets(50, 5, 762)
    assert buckets.find(num_sequences, num_rows, max_rows, num_sequences) == bucket
    assert bucket is None or bucket in buckets.decoding + buckets.with_prompts


def test_a_step_has_no_bucket_with_fewer_logits_than_it_wants():
    buckets = Buckets(10, 5, 550)
    assert buckets.find(1, 300, 300, 50) == Bucket(10, 320, 320, 50)
    assert buckets.find(1, 300, 300, 51) is None
    assert buckets.find(1, 60, 60, 50) == Bucket(10, 64, 64, 50)
    assert buckets.find(1, 60, 60, 51) is None
    assert Buckets(1, 1, 512).find(1, 300, 300, 1) == Bucket(1, 320, 320, 2)


@pytest.mark.parametrize("rows_per_sequence", range(1, 18))
@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 64])
def test_every_bucket_holds_what_its_graph_is_captured_with(max_num_seqs, rows_per_sequence):
    every = Buckets(max_num_seqs, rows_per_sequence, max_num_seqs * rows_per_sequence + 40)
    buckets = every.decoding + every.with_prompts
    assert len(set(buckets)) == len(buckets)
    buffers = BatchBuffers(max(bucket.num_rows for bucket in buckets), max_num_seqs, 4, torch.device("cpu"))
    for bucket in buckets:
        padding = RaggedBatch([], torch.device("cpu"))
        loaded = buffers.load(padding, bucket.num_rows, bucket.num_sequences, max_rows=bucket.max_rows)
        sizes = (loaded.num_rows, loaded.num_sequences, loaded.max_rows)
        assert sizes == (bucket.num_rows, bucket.num_sequences, bucket.max_rows)


@pytest.mark.parametrize("rows_per_sequence", [1, 2, 3, 5, 9, 17])
def test_every_step_up_to_the_most_has_a_bucket(rows_per_sequence):
    buckets = Buckets(20, rows_per_sequence, 20 * rows_per_sequence)
    for num_sequences in range(1, 21):
        for num_rows in range(num_sequences, num_sequences * rows_per_sequence + 1):
            fewest = -(-num_rows // num_sequences)
            most = min(num_rows - num_sequences + 1, rows_per_sequence)
            for max_rows in {fewest, most}:
                found = buckets.find(num_sequences, num_rows, max_rows, num_rows)
                assert found in buckets.decoding
                assert found.has_all_logits
                assert found.num_sequences >= num_sequences
                assert found.num_rows >= num_rows
                assert found.max_rows >= max_rows


def test_buckets_come_from_the_largest_on_and_each_once():
    buckets = Buckets(4, 3, 100)
    assert buckets.decoding == [
        *(Bucket(4, 3, 12, 12), Bucket(3, 3, 9, 9), Bucket(2, 3, 6, 6), Bucket(4, 1, 4, 4)),
        *(Bucket(3, 1, 3, 3), Bucket(1, 3, 3, 3), Bucket(2, 1, 2, 2), Bucket(1, 1, 2, 2)),
    ]
    assert buckets.with_prompts == [Bucket(4, 100, 100, 12), Bucket(4, 96, 96, 12), Bucket(4, 64, 64, 12)]


def test_a_large_batch_has_buckets_for_few_drafts():
    sizes = {bucket.num_rows for bucket in Buckets(32, 17, 544).decoding if bucket.num_sequences == 32}
    assert sizes == {32 * rows for rows in (1, 2, 3, 5, 8, 12, 17)}


def test_without_drafts_there_is_one_row_a_sequence():
    assert Buckets(2, 1, 2).decoding == [Bucket(2, 1, 2, 2), Bucket(1, 1, 2, 2)]
