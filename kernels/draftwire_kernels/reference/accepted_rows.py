"""Gathers the rows of a verify step, accepted rows first, with a stable sort."""

import torch
from torch import Tensor


def gather_accepted_rows(
    rows: Tensor, slots: Tensor, cu_rows: Tensor, places: Tensor, drawn: Tensor, out: Tensor
) -> None:
    sequence = torch.repeat_interleave(cu_rows.diff())
    offset = torch.arange(slots.shape[0], device=slots.device) - cu_rows.index_select(0, sequence)
    is_refused = offset >= drawn[:, 0].index_select(0, places.index_select(0, sequence))
    accepted_first = torch.argsort(is_refused.to(torch.uint8), stable=True)
    torch.index_select(rows, 0, slots.index_select(0, accepted_first), out=out)
