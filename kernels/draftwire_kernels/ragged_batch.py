"""Ragged batches: cache slots and attention ranges of the rows of sequences with different lengths.

A cache is a pool of blocks of `BLOCK_SIZE` slots; a slot has the keys and values of one row. Block 0 belongs to no
sequence and receives padding, which is never read. A sequence is rolled back by a shorter length; later rows are
overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from draftwire_kernels.attention_groups import Group, groups_of
from draftwire_kernels.validation import check_tensor

BLOCK_SIZE = 16
_ALIGNMENT = 16  # bytes; kernels load vectors of this width


@dataclass(slots=True)
class SequenceRows:
    """Rows start .. start + count - 1 of one sequence; each attends to the sequence's rows from 0 to itself.

    `blocks` are the ids of the sequence's blocks, at least enough for its rows: a list, or an array of integers
    (`array.array`, `numpy.ndarray`), which is faster for long contexts.
    """

    blocks: Sequence[int]
    start: int
    count: int


class _SequenceRows(NamedTuple):
    """The rows of sequences as arrays."""

    counts: np.ndarray  # int64 [B], rows of each sequence
    lengths: np.ndarray  # int64 [B], of the sequences, including these rows
    widths: np.ndarray  # int64 [B], given blocks
    blocks: np.ndarray  # int32 [sum of widths], the blocks of all sequences
    num_rows: int
    width: int  # most blocks of a sequence
    max_rows: int
    max_length: int

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows]) -> _SequenceRows:
        """Return the rows of sequences.

        Raises
        ------
        ValueError
            If a sequence has fewer blocks than its rows need.
        """
        numbers = [(one.count, one.start, len(one.blocks)) for one in sequences]
        counts, starts, widths = np.array(numbers, np.int64).reshape(-1, 3).T
        lengths = starts + counts
        lacking = np.flatnonzero(widths * BLOCK_SIZE < lengths)
        if len(lacking):
            index = int(lacking[0])
            raise ValueError(
                f"sequences[{index}].blocks: got {widths[index]} blocks, expected at least "
                f"{-(-lengths[index] // BLOCK_SIZE)} for {lengths[index]} rows"
            )
        num_blocks = int(widths.sum())
        blocks = np.fromiter(chain.from_iterable(one.blocks for one in sequences), np.int32, num_blocks)
        most = [int(column.max(initial=0)) for column in (widths, counts, lengths)]
        return cls(counts, lengths, widths, blocks, int(counts.sum()), *most)

    @property
    def num_sequences(self) -> int:
        """Return B."""
        return len(self.counts)

    def fill(self, slot_mapping: np.ndarray, cu_rows: np.ndarray, lengths: np.ndarray, tables: np.ndarray) -> None:
        """Write the tensors of a `RaggedBatch`; the first three may have room for padding."""
        tables[:] = 0
        tables[np.arange(tables.shape[1]) < self.widths[:, None]] = self.blocks
        ends = self.counts.cumsum()
        cu_rows[0] = 0
        cu_rows[1 : len(ends) + 1] = ends
        lengths[: len(ends)] = self.lengths
        slot_mapping[: self.num_rows] = _slots(tables, self.lengths - self.counts, self.counts)


class _Views(NamedTuple):
    """The parts of a packed buffer."""

    slot_mapping: torch.Tensor
    cu_rows: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor


class RaggedBatch:
    """Cache slots and attention ranges of the rows of a step's sequences.

    Attributes
    ----------
    slot_mapping
        [T] int64, the slot of each row in the cache.
    cu_rows
        [B + 1] int32, prefix sums of the sequences' numbers of rows; rows past the last sum are padding.
    lengths
        [B] int32, rows of each sequence in the cache, including this batch.
    block_tables
        [B, W] int32, ids of each sequence's blocks, padded with 0.
    num_rows, num_sequences
        T and B, including padding.
    max_rows, max_length
        Upper bounds, known to the host, of a sequence's rows in this batch and of its length.
    """

    def __init__(self, sequences: Sequence[SequenceRows], device: torch.device) -> None:
        """Fill one buffer on the host and copy it to the device.

        Raises
        ------
        ValueError
            If a sequence has fewer blocks than its rows need.
        """
        rows = _SequenceRows.of(sequences)
        sizes = (rows.num_rows, rows.num_sequences, max(rows.width, 1))
        host = _buffer(_packed_bytes(*sizes), device)
        views = _views(host, *sizes)
        rows.fill(*(view.numpy() for view in views))
        self._host: _Views | None = views
        on_device = _views(host.to(device, non_blocking=True), *sizes)
        self._set(on_device, rows.max_rows, rows.max_length)

    @classmethod
    def from_tensors(
        cls,
        slot_mapping: torch.Tensor,
        cu_rows: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        max_rows: int,
        max_length: int,
    ) -> RaggedBatch:
        """Return a batch with tensors that are computed on the device; keeps them without a copy and reads no values.

        The kernels read the tensors in every call. The torch reference reads them once, and needs a new batch after a
        change in place.

        Raises
        ------
        ValueError
            If a tensor has the wrong shape, dtype or device, or a bound is not positive.
        """
        device = slot_mapping.device
        check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), (device,))
        check_tensor("lengths", lengths, ("B",), (torch.int32,), (device,))
        check_tensor("cu_rows", cu_rows, (lengths.shape[0] + 1,), (torch.int32,), (device,))
        check_tensor("block_tables", block_tables, (lengths.shape[0], "W"), (torch.int32,), (device,))
        for name, bound in (("max_rows", max_rows), ("max_length", max_length)):
            if bound < 1:
                raise ValueError(f"{name}: got {bound}, expected at least 1")
        batch = cls.__new__(cls)
        batch._host = None
        batch._set(_Views(slot_mapping, cu_rows, lengths, block_tables), max_rows, max_length)
        return batch

    def _set(self, views: _Views, max_rows: int, max_length: int) -> None:
        self.slot_mapping, self.cu_rows, self.lengths, self.block_tables = views
        self.num_rows, self.num_sequences = views.slot_mapping.shape[0], views.lengths.shape[0]
        self.max_rows, self.max_length = max_rows, max_length

    @property
    def host(self) -> _Views:
        """The tensors on the CPU; waits for the device if they are computed there."""
        if self._host is None:
            self._host = _Views(
                self.slot_mapping.cpu(), self.cu_rows.cpu(), self.lengths.cpu(), self.block_tables.cpu()
            )
        return self._host

    @cached_property
    def groups(self) -> list[Group]:
        """Return the groups that the torch reference gathers; computed on first use."""
        _, cu_rows, lengths, block_tables = self.host
        return groups_of(cu_rows.numpy(), lengths.numpy(), block_tables.numpy(), BLOCK_SIZE, self.slot_mapping.device)


class BatchBuffers:
    """The tensors of a `RaggedBatch` at fixed addresses, for CUDA graphs; filled before each replay.

    They must live as long as the graphs that captured them.
    """

    def __init__(
        self, max_rows_total: int, max_sequences: int, max_blocks_per_sequence: int, device: torch.device
    ) -> None:
        """Allocate buffers for the given numbers of rows in total, sequences, and blocks per sequence."""
        self._device = device
        self._sizes = (max_rows_total, max_sequences, max_blocks_per_sequence)
        self._packed = torch.zeros(_packed_bytes(*self._sizes), dtype=torch.uint8, device=device)
        self._vectors = _views(self._packed, *self._sizes)[:3]
        # A step's tables are copied packed to their own width after the other tensors, and spread on the device.
        self._block_tables = torch.zeros(max_sequences, max_blocks_per_sequence, dtype=torch.int32, device=device)

    def load(
        self,
        sequences: Sequence[SequenceRows],
        num_rows_padded: int,
        num_sequences_padded: int,
        *,
        max_rows: int | None = None,
        max_length: int | None = None,
    ) -> RaggedBatch:
        """Fill the buffers with the rows of sequences and padding, in one copy from the host, on the current stream.

        Padded rows are written to block 0 and belong to no sequence; padded sequences have no rows, length 0 and any
        blocks.

        Parameters
        ----------
        sequences
            The sequences of the batch.
        num_rows_padded, num_sequences_padded
            T and B of the result.
        max_rows
            Upper bound of a sequence's rows for the captured kernels; by default
            num_rows_padded / num_sequences_padded, rounded up.
        max_length
            Upper bound of a sequence's length for the captured kernels; by default that of the buffers. Kernels
            captured for short sequences are slightly faster.

        Returns
        -------
        RaggedBatch
            Views of the buffers, with these bounds as `max_rows` and `max_length`, so that a graph captured with them
            serves every batch that fits.

        Raises
        ------
        ValueError
            If the batch is larger than the padded numbers, the bounds or the buffers, or a sequence has fewer blocks
            than its rows need.
        """
        if max_rows is None:
            max_rows = -(-num_rows_padded // max(num_sequences_padded, 1))
        if max_length is None:
            max_length = self._sizes[2] * BLOCK_SIZE
        rows = _SequenceRows.of(sequences)
        self._check(rows, num_rows_padded, num_sequences_padded, max_rows, max_length)
        return self._stage(rows).send(num_rows_padded, num_sequences_padded, max_rows=max_rows, max_length=max_length)

    def stage(self, sequences: Sequence[SequenceRows]) -> BatchStage:
        """Return the rows of sequences in host memory, ready to be copied to the buffers."""
        return self._stage(_SequenceRows.of(sequences))

    def _stage(self, rows: _SequenceRows) -> BatchStage:
        total, sequences, columns = self._sizes
        count, width = rows.num_sequences, max(rows.width, 1)
        for name, value, most in (("num_sequences", count, sequences), ("width", width, columns)):
            if value > most:
                raise ValueError(f"{name}: got {value}, expected 0 to {most}")
        begin = _packed_bytes(total, sequences, 0)
        host = _buffer(begin + count * width * 4, self._device)
        tables = self._packed[begin : len(host)].view(torch.int32).view(count, width)
        return BatchStage(host, rows, self._packed, _Views(*self._vectors, tables), self._block_tables)

    def _check(
        self, rows: _SequenceRows, num_rows: int, num_sequences: int, max_rows: int, max_length: int
    ) -> None:
        total, sequences, columns = self._sizes
        for name, value, least, most in (
            ("num_rows_padded", num_rows, rows.num_rows, total),
            ("num_sequences_padded", num_sequences, rows.num_sequences, sequences),
            ("max_rows", max_rows, max(rows.max_rows, 1), num_rows),
            ("max_length", max_length, max(rows.max_length, 1), columns * BLOCK_SIZE),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: got {value}, expected {least} (what the batch has) to {most}")
        if rows.width > columns:
            raise ValueError(
                f"sequences: got a sequence of {rows.width} blocks, expected at most {columns}, "
                "the buffers' max_blocks_per_sequence"
            )


class BatchStage:
    """A batch in host memory, before its copy to `BatchBuffers`."""

    def __init__(
        self,
        host: torch.Tensor,
        rows: _SequenceRows,
        packed: torch.Tensor,
        on_device: _Views,
        block_tables: torch.Tensor,
    ) -> None:
        """Fill `host`, the memory to copy to `packed`, of which `on_device` are the parts; `block_tables` are those of
        the buffers."""
        self._host = host
        self._on_device = on_device
        self._packed = packed
        self._block_tables = block_tables
        self._views, begin = [], 0
        flat: np.ndarray = host.numpy()
        for part, dtype in zip(on_device, (np.int64, np.int32, np.int32, np.int32), strict=True):
            num_bytes = part.numel() * part.itemsize
            self._views.append(flat[begin : begin + num_bytes].view(dtype).reshape(part.shape))
            begin += _aligned(num_bytes)
        rows.fill(*self._views)
        self._num_rows = rows.num_rows
        self._pad(rows.num_sequences)

    @property
    def slots(self) -> np.ndarray:
        """Return the slots of the rows, int64 [T]: a view that `set_rows` changes."""
        slots: np.ndarray = self._views[0][: self._num_rows]
        return slots

    def _pad(self, count: int) -> None:
        slot_mapping, cu_rows, lengths, _ = self._views
        slot_mapping[self._num_rows :] = np.arange(len(slot_mapping) - self._num_rows) % BLOCK_SIZE
        cu_rows[count + 1 :] = self._num_rows
        lengths[count:] = 0

    def set_rows(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Change the rows of the sequences before the copy; their blocks are unchanged.

        Parameters
        ----------
        starts, counts
            int64 [B], position of the first row and number of rows of each sequence, within its blocks and the buffers.

        Returns
        -------
        numpy.ndarray
            int64 [T], the slots of the rows.
        """
        slot_mapping, cu_rows, lengths, tables = self._views
        count, ends = len(counts), counts.cumsum()
        self._num_rows = int(ends[-1])
        slots = slot_mapping[: self._num_rows] = _slots(tables, starts, counts)
        cu_rows[1 : count + 1] = ends
        lengths[:count] = starts + counts
        self._pad(count)
        return slots

    def send(self, num_rows: int, num_sequences: int, *, max_rows: int, max_length: int) -> RaggedBatch:
        """Copy the batch to the buffers on the current stream; return views of the padded rows and sequences."""
        parts = self._on_device
        count, width = parts.block_tables.shape
        self._packed[: self._host.numel()].copy_(self._host, non_blocking=True)
        self._block_tables[:count, :width].copy_(parts.block_tables)
        return RaggedBatch.from_tensors(
            parts.slot_mapping[:num_rows],
            parts.cu_rows[: num_sequences + 1],
            parts.lengths[:num_sequences],
            self._block_tables[:num_sequences],
            max_rows=max_rows,
            max_length=max_length,
        )


def _slots(tables: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the slots, int64 [T], of rows starts[b] .. starts[b] + counts[b] - 1 of sequences with these blocks."""
    ends = counts.cumsum()
    positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts + counts - ends, counts)
    blocks = tables[np.repeat(np.arange(len(counts)), counts), positions // BLOCK_SIZE]
    return blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _packed_bytes(num_rows: int, num_sequences: int, width: int) -> int:
    vectors = _aligned(num_rows * 8) + _aligned((num_sequences + 1) * 4) + _aligned(num_sequences * 4)
    return vectors + num_sequences * width * 4


def _views(buffer: torch.Tensor, num_rows: int, num_sequences: int, width: int) -> _Views:
    """Return the parts of a packed buffer: the vectors, then the block tables."""
    views, begin = [], 0
    for count, dtype in ((num_rows, torch.int64), (num_sequences + 1, torch.int32), (num_sequences, torch.int32)):
        num_bytes = count * dtype.itemsize
        views.append(buffer[begin : begin + num_bytes].view(dtype))
        begin += _aligned(num_bytes)
    tables = buffer[begin : begin + num_sequences * width * 4].view(torch.int32)
    return _Views(views[0], views[1], views[2], tables.view(num_sequences, width))


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host; for a CUDA device in pinned memory, which torch reuses only after the copy."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
