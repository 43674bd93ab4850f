"""Computes the column of each target id in a reduced vocabulary."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _table_kernel(token_ids, table, num_columns, vocab, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + column, mask=column < num_columns, other=-1)
    tl.store(table + token, column, mask=(token >= 0) & (token < vocab))


def column_table(token_ids: Tensor, vocab: int) -> Tensor:
    """Return the column of each target id, int32 [vocab]; -1 for ids without a column."""
    table = torch.full((vocab,), -1, dtype=torch.int32, device=token_ids.device)
    _table_kernel[(triton.cdiv(token_ids.shape[0], 1024),)](
        token_ids.contiguous(), table, token_ids.shape[0], vocab, BLOCK=1024
    )
    return table
