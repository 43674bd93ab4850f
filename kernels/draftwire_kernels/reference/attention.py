"""Attention over a paged cache in torch, which gathers the context of each group for torch's attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftwire_kernels.ragged_batch import RaggedBatch


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
    anchored: bool,
) -> torch.Tensor:
    keys.index_copy_(0, batch.slot_mapping, key)
    values.index_copy_(0, batch.slot_mapping, value)
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    for group in batch.groups:
        q = query[group.rows].transpose(1, 2)
        k = keys[group.context].transpose(1, 2)
        v = values[group.context].transpose(1, 2)
        mask = group.mask(window, causal, anchored)
        if softcap is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            attended = _softcapped(q, k, v, mask, scale, softcap)
        out[group.valid_rows] = attended.transpose(1, 2).flatten(0, 1)[group.valid]
    return out


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = softcap * torch.tanh((q.float() @ k.float().transpose(2, 3)) * (scale / softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
