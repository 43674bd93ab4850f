"""The sizes of batch that CUDA graphs are captured for, and which of them a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Bucket:
    """A batch of a fixed size: rows in all, and at most `max_rows` of one sequence."""

    num_sequences: int
    max_rows: int

    @property
    def num_rows(self) -> int:
        """Rows of the batch; two where one would do, because the compiler takes a size of one for a constant."""
        return max(self.num_sequences * self.max_rows, 2)


def sequence_counts(most: int) -> list[int]:
    """Numbers of sequences up to `most`: padding adds at most half, and at most an eighth from 64 sequences on."""
    counts = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8)]
    while counts[-1] < most:
        counts.append(counts[-1] + max(counts[-1] // 64, 1) * 8)
    return [*takewhile(lambda count: count < most, counts), most]


class Buckets:
    """All buckets of an engine.

    A step without drafts has one row a sequence, one with drafts up to `rows_per_sequence`; a step in between is padded
    to the latter.
    """

    def __init__(self, max_num_seqs: int, rows_per_sequence: int) -> None:
        self._counts = sequence_counts(max_num_seqs)
        self._widths = sorted({1, rows_per_sequence})

    def __iter__(self) -> Iterator[Bucket]:
        """From the largest on, so that the memory of one serves the next."""
        buckets = [Bucket(count, width) for count in self._counts for width in self._widths]
        return iter(sorted(buckets, key=lambda bucket: (bucket.num_rows, bucket.num_sequences), reverse=True))

    def find(self, num_sequences: int, max_rows: int) -> Bucket | None:
        """The smallest bucket that holds so many sequences of at most `max_rows` rows; None when none does."""
        count = bisect_left(self._counts, num_sequences)
        width = bisect_left(self._widths, max_rows)
        if count == len(self._counts) or width == len(self._widths):
            return None
        return Bucket(self._counts[count], self._widths[width])
