"""Sizes of batch that graphs are captured for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from verifier_service.target_buckets import Bucket, Buckets, sequence_counts


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


@pytest.mark.parametrize(
    ("num_sequences", "max_rows", "bucket"),
    [
        (1, 1, Bucket(1, 1)),
        (1, 2, Bucket(1, 5)),
        (1, 5, Bucket(1, 5)),
        (5, 1, Bucket(6, 1)),
        (9, 4, Bucket(12, 5)),
        (33, 5, Bucket(40, 5)),
        (50, 1, Bucket(50, 1)),
        (49, 3, Bucket(50, 5)),
        (51, 1, None),
        (1, 6, None),
    ],
)
def test_a_step_is_padded_to_the_next_bucket(num_sequences, max_rows, bucket):
    buckets = Buckets(50, 5)
    assert buckets.find(num_sequences, max_rows) == bucket
    assert bucket is None or bucket in list(buckets)


def test_buckets_come_from_the_largest_on_and_each_once():
    buckets = list(Buckets(4, 3))
    assert buckets == [
        Bucket(4, 3), Bucket(3, 3), Bucket(2, 3), Bucket(4, 1), Bucket(3, 1), Bucket(1, 3), Bucket(2, 1), Bucket(1, 1),
    ]  # fmt: skip
    assert [bucket.num_rows for bucket in buckets] == [12, 9, 6, 4, 3, 3, 2, 2]


def test_without_drafts_there_is_one_row_a_sequence():
    assert list(Buckets(2, 1)) == [Bucket(2, 1), Bucket(1, 1)]
