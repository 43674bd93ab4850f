"""Gathers the rows of a verify step, accepted rows first, in one launch.

A program copies a part of one row. It computes the row's destination as the number of earlier accepted rows, a sum over
the sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SEQUENCES, COLUMNS = 128, 2048
"""Sequences per iteration, and columns per program."""


@triton.jit(do_not_specialize=["drawn_columns", "num_sequences"])
def accepted_rows_kernel(
    rows,  # [S, W]
    slots,  # [T] int64
    cu_rows,  # [n + 1] int32
    places,  # [n] int64
    drawn,  # [B, columns] int64
    drawn_columns,
    out,  # [T, W]
    width,
    num_sequences,
    SEQUENCES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Loaded before the destination is computed, because this load takes longest.
    values = tl.load(rows + tl.load(slots + row) * width + column, mask=column < width)
    true_before = tl.zeros([SEQUENCES], tl.int32)
    accepted_in_all = tl.zeros([SEQUENCES], tl.int32)
    is_accepted = tl.zeros([SEQUENCES], tl.int32)
    for begin in range(0, num_sequences, SEQUENCES):
        sequence = begin + tl.arange(0, SEQUENCES)
        is_one = sequence < num_sequences
        first = tl.load(cu_rows + sequence, mask=is_one, other=0)
        last = tl.load(cu_rows + sequence + 1, mask=is_one, other=0)
        place = tl.load(places + sequence, mask=is_one, other=0)
        num_drawn = tl.load(drawn + place * drawn_columns, mask=is_one, other=0)
        num_true = tl.minimum(tl.maximum(num_drawn, 0), (last - first).to(tl.int64)).to(tl.int32)
        true_before += tl.minimum(tl.maximum(row - first, 0), num_true)
        accepted_in_all += num_true
        is_accepted += ((row >= first) & (row < first + num_true)).to(tl.int32)
    before = tl.sum(true_before, 0)
    destination = tl.where(tl.sum(is_accepted, 0) > 0, before, tl.sum(accepted_in_all, 0) + row - before)
    tl.store(out + destination.to(tl.int64) * width + column, values, mask=column < width)


def gather_accepted_rows(
    rows: Tensor, slots: Tensor, cu_rows: Tensor, places: Tensor, drawn: Tensor, out: Tensor
) -> None:
    num_rows, width = out.shape
    columns = min(triton.next_power_of_2(width), COLUMNS)
    with torch.cuda.device(rows.device if rows.is_cuda else -1):
        accepted_rows_kernel[(num_rows, triton.cdiv(width, columns))](
            rows,
            slots,
            cu_rows,
            places,
            drawn,
            drawn.shape[1],
            out,
            width,
            places.shape[0],
            SEQUENCES=SEQUENCES,
            COLUMNS=columns,
        )
