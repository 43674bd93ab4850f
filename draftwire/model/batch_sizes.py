"""Padded batch sizes on a GPU, so that few sizes are compiled and captured."""

from __future__ import annotations

from itertools import takewhile


def row_counts(most: int) -> list[int]:
    """Return sizes up to `most` rows: padding adds less than 64 rows, and from 256 rows on at most an eighth."""
    counts = [64]
    while counts[-1] < most:
        counts.append(counts[-1] + max(1 << counts[-1].bit_length() >> 4, 32))
    return [*takewhile(lambda count: count < most, counts), most]
