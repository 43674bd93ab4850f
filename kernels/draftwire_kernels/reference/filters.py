"""min-p, top-k and top-p, each as a threshold on the logits of the rows that use it."""

from collections.abc import Callable

import torch
from torch import Tensor

from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference.distribution import scale
from draftwire_kernels.reference.layout import Layout

_NUCLEUS_GUESS = 128
"""Candidates looked at before a row is sorted whole: most nuclei are smaller."""


def apply_filters(logits: Tensor, sampling: LogitsSampling, layout: Layout) -> Tensor:
    device = layout.first_row.device
    vocab = logits.shape[1]
    sampled = sampling.temperature.to(device) > 0
    min_p = _in_use(sampling.min_p, sampled, 0.0, lambda p: p > 0)
    top_k = _in_use(sampling.top_k, sampled, 0, lambda k: (k > 0) & (k < vocab))
    top_p = _in_use(sampling.top_p, sampled, 1.0, lambda p: p < 1)
    rows = layout.rows_of((min_p > 0) | (top_k > 0) | (top_p < 1))
    if rows.shape[0] == 0:
        return logits

    request = layout.row_request[rows]
    on_device = rows.to(logits.device)
    x = logits[on_device].float()
    scores, _ = scale(x, sampling.temperature.to(device)[request].to(logits.device), torch.float32)
    _apply_min_p(x, scores, min_p[request])
    _apply_top_k(x, top_k[request])
    _apply_top_p(x, scores, top_p[request])
    return logits.index_copy(0, on_device, x.to(logits.dtype))


def _in_use(values: Tensor | None, sampled: Tensor, off: float, used: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameter [B], `off` where the request does not use it."""
    if values is None:
        return torch.full(sampled.shape, off, device=sampled.device)
    values = values.to(sampled.device)
    return torch.where(sampled & used(values), values, off)


def _apply_min_p(x: Tensor, scores: Tensor, min_p: Tensor) -> None:
    if (min_p > 0).any():
        log_min_p = min_p.to(x.device).log()  # scores are log(p / largest p)
        x.masked_fill_(scores < log_min_p[:, None], -torch.inf)


def _apply_top_k(x: Tensor, top_k: Tensor) -> None:
    rows = (top_k > 0).nonzero()[:, 0]
    if rows.shape[0] == 0:
        return
    k = top_k[rows].long()
    largest = int(k.max())
    rows, k = rows.to(x.device), k.to(x.device)
    chosen = x[rows]
    threshold = chosen.topk(largest).values.gather(1, k[:, None] - 1)
    x[rows] = chosen.masked_fill_(chosen < threshold, -torch.inf)


def _apply_top_p(x: Tensor, scores: Tensor, top_p: Tensor) -> None:
    rows = (top_p < 1).nonzero()[:, 0].to(x.device)
    top_p = top_p.to(x.device)
    vocab = x.shape[1]
    for candidates in (min(_NUCLEUS_GUESS, vocab), vocab):
        if rows.shape[0] == 0:
            return
        chosen = x[rows]
        probs = scores[rows].masked_fill_(chosen == -torch.inf, -torch.inf).softmax(-1)
        values, index = chosen.topk(candidates)
        mass = probs.gather(1, index).cumsum(-1)
        limit = top_p[rows][:, None]
        size = (mass < limit).sum(-1, keepdim=True)  # tokens before the one that reaches the limit
        chosen.masked_fill_(chosen < values.gather(1, size.clamp(max=candidates - 1)), -torch.inf)
        found = (size[:, 0] < candidates) | torch.tensor(candidates == vocab, device=x.device)
        x[rows[found]] = chosen[found]
        rows = rows[~found]
