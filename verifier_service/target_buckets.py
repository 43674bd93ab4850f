"""The sizes of batch that CUDA graphs are captured for, and which of them a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

# Up to so many rows padding costs little: of an 8B target on an H200 1 took 4.55 ms, 40 took 5.05 and 160 took 6.34.
_FEW_ROWS = 40


@dataclass(frozen=True)
class Bucket:
    """A batch of a fixed size: at most `max_rows` of one sequence, and room for `rows_each` of each on average."""

    num_sequences: int
    max_rows: int
    rows_each: int

    @property
    def num_rows(self) -> int:
        """Rows of the batch; two where one would do, because the compiler takes a size of one for a constant."""
        return max(self.num_sequences * self.rows_each, 2)


def sequence_counts(most: int) -> list[int]:
    """Numbers of sequences up to `most`: padding adds at most half, and at most an eighth from 64 sequences on."""
    counts = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8)]
    while counts[-1] < most:
        counts.append(counts[-1] + max(counts[-1] // 64, 1) * 8)
    return [*takewhile(lambda count: count < most, counts), most]


class Buckets:
    """All buckets of an engine.

    A step without drafts has one row a sequence. One with drafts has up to `rows_per_sequence`, and so many rows in all
    as its drafts want: where that makes a difference to the forward pass there are buckets for fewer in the mean, for
    steps in which few sequences have drafts, or all have few.
    """

    def __init__(self, max_num_seqs: int, rows_per_sequence: int) -> None:
        self._counts = sequence_counts(max_num_seqs)
        self._buckets = [_of(count, rows_per_sequence) for count in self._counts]

    def __iter__(self) -> Iterator[Bucket]:
        """From the largest on, so that the memory of one serves the next."""
        every = chain.from_iterable(self._buckets)
        return iter(sorted(every, key=lambda bucket: (bucket.num_rows, bucket.num_sequences), reverse=True))

    def find(self, num_sequences: int, num_rows: int, max_rows: int) -> Bucket | None:
        """The smallest bucket for that many sequences with `num_rows` rows, at most `max_rows` of one; None if none."""
        place = bisect_left(self._counts, num_sequences)
        if place == len(self._counts):
            return None
        fitting = (one for one in self._buckets[place] if one.max_rows >= max_rows and one.num_rows >= num_rows)
        return next(fitting, None)


def _of(count: int, most: int) -> list[Bucket]:
    """The buckets for `count` sequences of up to `most` rows, the smallest first."""
    means = takewhile(lambda rows: rows < most, _rising()) if count * most > _FEW_ROWS else ()
    with_drafts = [Bucket(count, min(most, count * rows), rows) for rows in (*means, most) if most > 1]
    return [Bucket(count, 1, 1), *with_drafts]


def _rising() -> Iterator[int]:
    """2, 3, 5, 8, 12, ...: each half as much again as the one before."""
    rows = 2
    while True:
        yield rows
        rows += (rows + 1) // 2
