"""Ragged batches: cache slots and attention ranges of the rows of sequences with different lengths.

A cache is a pool of blocks of `BLOCK_SIZE` slots; a slot has the keys and values of one row. Block 0 belongs to no
sequence and receives padding, which is never read. A sequence is rolled back by a shorter length; later rows are
overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
        counts = np.array([sequence.count for sequence in sequences], np.int64)
        lengths = np.array([sequence.start for sequence in sequences], np.int64) + counts
        width = max((len(sequence.blocks) for sequence in sequences), default=0)
        sizes = (int(counts.sum()), len(sequences), max(width, 1))
        host = _buffer(_packed_bytes(*sizes), device)
        views = _views(host, *sizes)
        tables = views.block_tables.numpy()
        _fill_tables(tables, sequences, lengths)
        first_rows = np.concatenate([[0], counts.cumsum()])
        views.cu_rows.numpy()[:] = first_rows
        views.lengths.numpy()[:] = lengths
        # Position of a row: its index in the batch, minus the index of its sequence's first row, plus the start.
        positions = np.arange(sizes[0]) + np.repeat(lengths - first_rows[1:], counts)
        blocks = tables[np.repeat(np.arange(sizes[1]), counts), positions // BLOCK_SIZE]
        views.slot_mapping.numpy()[:] = blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        self._host: _Views | None = views
        on_device = _views(host.to(device, non_blocking=True), *sizes)
        self._set(on_device, int(counts.max(initial=0)), int(lengths.max(initial=0)))

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
        # A step's tables are copied packed to their own width after the other tensors, and spread on the device.
        self._block_tables = torch.zeros(max_sequences, max_blocks_per_sequence, dtype=torch.int32, device=device)

    def load(
        self,
        batch: RaggedBatch,
        num_rows_padded: int,
        num_sequences_padded: int,
        *,
        max_rows: int | None = None,
        max_length: int | None = None,
    ) -> RaggedBatch:
        """Fill the buffers with `batch` and padding, in one copy from the host, on the current stream.

        Padded rows are written to block 0 and belong to no sequence; padded sequences have no rows, length 0 and any
        blocks.

        Parameters
        ----------
        batch
            A batch of sequences; on the CPU, so that its tensors are not copied to the device twice.
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
            If the batch is larger than the padded numbers, the bounds or the buffers.
        """
        if max_rows is None:
            max_rows = -(-num_rows_padded // max(num_sequences_padded, 1))
        if max_length is None:
            max_length = self._sizes[2] * BLOCK_SIZE
        self._check(batch, num_rows_padded, num_sequences_padded, max_rows, max_length)
        stage = self.stage(batch)
        return stage.send(num_rows_padded, num_sequences_padded, max_rows=max_rows, max_length=max_length)

    def stage(self, batch: RaggedBatch) -> BatchStage:
        """Return the batch in host memory, ready to be copied to the buffers."""
        total, sequences, columns = self._sizes
        count, width = batch.block_tables.shape
        for name, value, most in (("num_sequences", count, sequences), ("width", width, columns)):
            if value > most:
                raise ValueError(f"{name}: got {value}, expected 0 to {most}")
        host = _buffer(_packed_bytes(total, sequences, 0) + count * width * 4, self._device)
        return BatchStage(host, batch, self._packed, self._block_tables, self._sizes)

    def _check(self, batch: RaggedBatch, num_rows: int, num_sequences: int, max_rows: int, max_length: int) -> None:
        total, sequences, columns = self._sizes
        for name, value, least, most in (
            ("num_rows_padded", num_rows, batch.num_rows, total),
            ("num_sequences_padded", num_sequences, batch.num_sequences, sequences),
            ("max_rows", max_rows, max(batch.max_rows, 1), num_rows),
            ("max_length", max_length, max(batch.max_length, 1), columns * BLOCK_SIZE),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: got {value}, expected {least} (what the batch has) to {most}")
        if batch.block_tables.shape[1] > columns:
            raise ValueError(
                f"batch: got a sequence of {batch.block_tables.shape[1]} blocks, expected at most {columns}, "
                "the buffers' max_blocks_per_sequence"
            )


class BatchStage:
    """A batch in host memory, before its copy to `BatchBuffers`."""

    def __init__(
        self,
        host: torch.Tensor,
        batch: RaggedBatch,
        packed: torch.Tensor,
        block_tables: torch.Tensor,
        sizes: tuple[int, int, int],
    ) -> None:
        """Fill `host`, the memory to copy; `packed` and `block_tables` are the buffers of `sizes`."""
        total, sequences, _ = sizes
        rows, (count, width) = batch.num_rows, batch.block_tables.shape
        self._host = host
        self._static = _views(packed[: host.numel()], total, sequences, width, count)
        self._packed = packed
        self._block_tables = block_tables
        self._tables_shape = (count, width)
        own = batch.host
        self._views = [view.numpy() for view in _views(host, total, sequences, width, count)]
        slot_mapping, cu_rows, lengths, tables = self._views
        slot_mapping[:rows] = own.slot_mapping.numpy()
        slot_mapping[rows:] = np.arange(len(slot_mapping) - rows) % BLOCK_SIZE
        cu_rows[: count + 1] = own.cu_rows.numpy()
        cu_rows[count + 1 :] = rows
        lengths[:count] = own.lengths.numpy()
        lengths[count:] = 0
        tables[:] = own.block_tables.numpy()

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
        count, sums = len(counts), counts.cumsum()
        rows = int(sums[-1])
        positions = np.arange(rows) + np.repeat(starts + counts - sums, counts)
        blocks = tables[np.repeat(np.arange(count), counts), positions // BLOCK_SIZE]
        slot_mapping[:rows] = blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        slot_mapping[rows:] = np.arange(len(slot_mapping) - rows) % BLOCK_SIZE
        cu_rows[1 : count + 1] = sums
        cu_rows[count + 1 :] = rows
        lengths[:count] = starts + counts
        return slot_mapping[:rows].copy()

    def send(self, num_rows: int, num_sequences: int, *, max_rows: int, max_length: int) -> RaggedBatch:
        """Copy the batch to the buffers on the current stream; return views of the padded rows and sequences."""
        static, (count, width) = self._static, self._tables_shape
        self._packed[: self._host.numel()].copy_(self._host, non_blocking=True)
        self._block_tables[:count, :width].copy_(static.block_tables)
        return RaggedBatch.from_tensors(
            static.slot_mapping[:num_rows],
            static.cu_rows[: num_sequences + 1],
            static.lengths[:num_sequences],
            self._block_tables[:num_sequences],
            max_rows=max_rows,
            max_length=max_length,
        )


def _fill_tables(tables: np.ndarray, sequences: Sequence[SequenceRows], lengths: np.ndarray) -> None:
    tables[:] = 0
    needed = -(-lengths // BLOCK_SIZE)
    for index, (row, sequence) in enumerate(zip(tables, sequences, strict=True)):
        given = len(sequence.blocks)
        if given < needed[index]:
            raise ValueError(
                f"sequences[{index}].blocks: got {given} blocks, expected at least {needed[index]} for "
                f"{lengths[index]} rows"
            )
        row[:given] = sequence.blocks


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _packed_bytes(num_rows: int, num_sequences: int, width: int) -> int:
    vectors = _aligned(num_rows * 8) + _aligned((num_sequences + 1) * 4) + _aligned(num_sequences * 4)
    return vectors + num_sequences * width * 4


def _views(
    buffer: torch.Tensor, num_rows: int, num_sequences: int, width: int, num_tables: int | None = None
) -> _Views:
    """Return the parts of a packed buffer: the vectors, then `num_tables` block tables, by default one per sequence."""
    views, begin = [], 0
    for count, dtype in ((num_rows, torch.int64), (num_sequences + 1, torch.int32), (num_sequences, torch.int32)):
        num_bytes = count * dtype.itemsize
        views.append(buffer[begin : begin + num_bytes].view(dtype))
        begin += _aligned(num_bytes)
    num_tables = num_sequences if num_tables is None else num_tables
    tables = buffer[begin : begin + num_tables * width * 4].view(torch.int32)
    return _Views(views[0], views[1], views[2], tables.view(num_tables, width))


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host; for a CUDA device in pinned memory, which torch reuses only after the copy."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
