"""The batch sizes of CUDA graphs, and the choice of a size for a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

from draftwire.model.batch_sizes import row_counts

# Up to this number of rows padding is cheap: for an 8B target on an H200, 1 row took 4.55 ms, 40 took 5.05, 160 6.34.
_FEW_ROWS = 40
# Two, not one, because the compiler treats a size of one as a constant.
LEAST_ROWS = 2


@dataclass(frozen=True)
class Bucket:
    """A batch of a fixed size: at most `max_rows` of one sequence, and logits of at most `num_logit_rows`."""

    num_sequences: int
    max_rows: int
    num_rows: int
    num_logit_rows: int

    @property
    def has_all_logits(self) -> bool:
        """Return whether all rows have logits."""
        return self.num_logit_rows == self.num_rows


def sequence_counts(most: int) -> list[int]:
    """Return numbers of sequences up to `most`: padding adds at most half, from 64 sequences on at most an eighth."""
    counts = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8)]
    while counts[-1] < most:
        counts.append(counts[-1] + max(counts[-1] // 64, 1) * 8)
    return [*takewhile(lambda count: count < most, counts), most]


class Buckets:
    """The buckets of an engine.

    A step without drafts has one row per sequence. A step with drafts has up to `rows_per_sequence` rows per sequence.
    If the number of rows matters to the forward pass, there are also buckets with fewer rows on average, for steps with
    few drafts. A step with more rows of a sequence has prompts: its bucket depends only on its rows, and has the most
    logits that a step needs.

    Attributes:
        decoding, with_prompts: Largest first, so that smaller graphs reuse the memory of larger ones.
    """

    def __init__(self, max_num_seqs: int, rows_per_sequence: int, max_rows: int) -> None:
        """`max_rows` is the most rows of a step."""
        self._counts = sequence_counts(max_num_seqs)
        self._decoding = [_of(count, rows_per_sequence) for count in self._counts]
        self.decoding = sorted(chain.from_iterable(self._decoding), key=_size, reverse=True)
        self._row_counts = row_counts(max_rows)
        wanted = max(max_num_seqs * rows_per_sequence, LEAST_ROWS)
        self.with_prompts = [Bucket(max_num_seqs, rows, rows, min(rows, wanted)) for rows in self._row_counts[::-1]]

    def find(self, num_sequences: int, num_rows: int, max_rows: int, num_logit_rows: int) -> Bucket | None:
        """Return the smallest bucket for `num_sequences` sequences with `num_rows` rows, at most `max_rows` of one, and
        `num_logit_rows` rows with logits; None if there is none."""
        place = bisect_left(self._counts, num_sequences)
        if place == len(self._counts):
            return None
        for bucket in self._decoding[place]:
            if bucket.max_rows >= max_rows and bucket.num_rows >= num_rows:
                return bucket
        place = bisect_left(self._row_counts, num_rows)
        if place == len(self._row_counts) or self.with_prompts[-1 - place].num_logit_rows < num_logit_rows:
            return None
        return self.with_prompts[-1 - place]


def _size(bucket: Bucket) -> tuple[int, int]:
    return bucket.num_rows, bucket.num_sequences


def _of(count: int, most: int) -> list[Bucket]:
    """Return the buckets for `count` sequences of up to `most` rows, the smallest first."""
    means = takewhile(lambda rows: rows < most, _rising()) if count * most > _FEW_ROWS else ()
    sizes = [(1, 1), *((min(most, count * rows), rows) for rows in (*means, most) if most > 1)]
    numbers = ((max_rows, max(count * rows, LEAST_ROWS)) for max_rows, rows in sizes)
    return [Bucket(count, max_rows, num_rows, num_rows) for max_rows, num_rows in numbers]


def _rising() -> Iterator[int]:
    """Return 2, 3, 5, 8, 12, ...: each about 1.5 times the previous one."""
    rows = 2
    while True:
        yield rows
        rows += (rows + 1) // 2
