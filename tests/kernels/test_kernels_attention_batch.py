"""The tensors of a ragged batch, and the buffers that hold them for a CUDA graph."""

import array

import numpy as np
import pytest
import torch

from draftwire_kernels import BatchBuffers, RaggedBatch, SequenceRows

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_batch_describes_its_sequences() -> None:
    batch = RaggedBatch([SequenceRows([7, 3, 9], 15, 3), SequenceRows([4], 0, 2)], DEVICE)
    # Row 15 is the last of block 7, rows 16 and 17 the first of block 3.
    assert batch.slot_mapping.tolist() == [7 * 16 + 15, 3 * 16, 3 * 16 + 1, 4 * 16, 4 * 16 + 1]
    assert batch.cu_rows.tolist() == [0, 3, 5]
    assert batch.lengths.tolist() == [18, 2]
    assert batch.block_tables.tolist() == [[7, 3, 9], [4, 0, 0]]
    assert (batch.num_rows, batch.num_sequences, batch.max_rows, batch.max_length) == (5, 2, 3, 18)
    dtypes = [t.dtype for t in (batch.slot_mapping, batch.cu_rows, batch.lengths, batch.block_tables)]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert all(t.device.type == DEVICE.type for t in (batch.slot_mapping, batch.block_tables))


@pytest.mark.parametrize("kind", [list, lambda ids: array.array("i", ids), lambda ids: np.array(ids, np.int32)])
def test_blocks_may_be_lists_or_arrays(kind) -> None:
    batch = RaggedBatch([SequenceRows(kind([5, 2]), 16, 1)], DEVICE)
    assert batch.block_tables.tolist() == [[5, 2]]
    assert batch.slot_mapping.tolist() == [2 * 16]


def test_sequence_without_rows_and_batch_without_sequences() -> None:
    batch = RaggedBatch([SequenceRows([5], 4, 0), SequenceRows([6], 1, 1)], DEVICE)
    assert batch.cu_rows.tolist() == [0, 0, 1]
    assert batch.slot_mapping.tolist() == [6 * 16 + 1]
    empty = RaggedBatch([], DEVICE)
    assert (empty.num_rows, empty.num_sequences, empty.max_rows) == (0, 0, 0)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences\[1\].blocks: got 1 blocks, expected at least 2 for 17 rows"):
        RaggedBatch([SequenceRows([1], 0, 1), SequenceRows([2], 16, 1)], CPU)


def test_tensors_computed_on_the_device_make_the_same_batch() -> None:
    made = RaggedBatch([SequenceRows([7, 3], 15, 3), SequenceRows([4], 0, 2)], DEVICE)
    tensors = (made.slot_mapping, made.cu_rows, made.lengths, made.block_tables)
    batch = RaggedBatch.from_tensors(*tensors, max_rows=4, max_length=64)
    assert batch.slot_mapping is made.slot_mapping
    assert all(torch.equal(a, b) for a, b in zip(batch.host, made.host, strict=True))
    assert (batch.num_rows, batch.num_sequences, batch.max_rows, batch.max_length) == (5, 2, 4, 64)


@pytest.mark.parametrize(
    ("name", "value"), [("lengths", torch.zeros(3, dtype=torch.int32)), ("cu_rows", torch.zeros(3)), ("max_rows", 0)]
)
def test_bad_tensors_are_refused_by_name(name, value) -> None:
    made = RaggedBatch([SequenceRows([7, 3], 15, 3), SequenceRows([4], 0, 2)], CPU)
    arguments = {n: getattr(made, n) for n in ("slot_mapping", "cu_rows", "lengths", "block_tables")}
    with pytest.raises(ValueError, match="cu_rows" if name == "lengths" else name):
        RaggedBatch.from_tensors(**{"max_rows": 3, "max_length": 18, **arguments, name: value})


def _loaded(buffers: BatchBuffers, sequences: list[SequenceRows], **bounds: int) -> RaggedBatch:
    return buffers.load(sequences, 6, 3, **bounds)


def test_buffers_pad_with_block_0_and_sequences_without_rows() -> None:
    buffers = BatchBuffers(8, 4, 5, DEVICE)
    _loaded(buffers, [SequenceRows([9, 8, 7, 6, 5], 70, 2)] * 3)  # stale values, to be overwritten
    batch = _loaded(buffers, [SequenceRows([7, 3], 15, 2), SequenceRows([4], 2, 1)])
    assert batch.slot_mapping.tolist()[:3] == [7 * 16 + 15, 3 * 16, 4 * 16 + 2]
    assert all(0 <= slot < 16 for slot in batch.slot_mapping.tolist()[3:])
    assert batch.cu_rows.tolist() == [0, 2, 3, 3]
    assert batch.lengths.tolist() == [17, 3, 0]
    assert batch.block_tables.shape == (3, 5)
    assert batch.block_tables[:2, :2].tolist() == [[7, 3], [4, 0]]


def test_buffers_keep_their_addresses_and_bounds() -> None:
    buffers = BatchBuffers(8, 4, 5, DEVICE)
    first = _loaded(buffers, [SequenceRows([7, 3], 15, 2)])
    tensors = (first.slot_mapping, first.cu_rows, first.lengths, first.block_tables)
    second = _loaded(buffers, [SequenceRows([4, 2, 1], 40, 1), SequenceRows([9], 0, 1)])
    again = (second.slot_mapping, second.cu_rows, second.lengths, second.block_tables)
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in again]
    assert [t.stride() for t in tensors] == [t.stride() for t in again]
    assert (first.max_rows, first.max_length) == (second.max_rows, second.max_length) == (2, 80)
    # Both batches are views of the buffers.
    assert first.lengths.tolist() == [41, 1, 0]
    bounded = _loaded(buffers, [SequenceRows([7], 0, 4)], max_rows=4, max_length=32)
    assert (bounded.max_rows, bounded.max_length) == (4, 32)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([SequenceRows([1, 2, 3], 40, 1)], "max_length: got 40, expected 41"),
        ([SequenceRows([1], 0, 7)], "num_rows_padded: got 6, expected 7"),
        ([SequenceRows([1], 0, 1)] * 4, "num_sequences_padded: got 3, expected 4"),
        ([SequenceRows([1], 0, 3)], "max_rows: got 2, expected 3"),
        ([SequenceRows([1] * 6, 0, 1)], "got a sequence of 6 blocks, expected at most 5"),
    ],
)
def test_batches_larger_than_the_padding_are_refused(sequences, message) -> None:
    with pytest.raises(ValueError, match=message):
        _loaded(BatchBuffers(8, 4, 5, DEVICE), sequences, max_length=40)
