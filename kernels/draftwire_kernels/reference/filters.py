"""min-p, top-k and top-p as thresholds on the logits of the rows that use them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference.distribution import scale
from draftwire_kernels.reference.layout import Layout

_NO_TOP_P = 2.0
"""A top-p above the mass of any row, so that rounding never cuts a row without top-p."""


def apply_filters(logits: Tensor, sampling: LogitsSampling, layout: Layout) -> Tensor:
    """Return the logits with -inf for tokens that min-p, top-k and top-p remove; the input if no request uses them."""
    vocab = logits.shape[1]
    sampled = sampling.temperature.to(layout.first_row.device) > 0
    min_p = _in_use(sampling.min_p, sampled, 0.0, lambda p: p > 0)
    top_k = _in_use(sampling.top_k, sampled, vocab, lambda k: (k > 0) & (k < vocab))
    top_p = _in_use(sampling.top_p, sampled, _NO_TOP_P, lambda p: p < 1)
    searched = (top_k < vocab) | (top_p < 1)
    rows = layout.rows_of(searched | (min_p > 0))
    if rows.shape[0] == 0:
        return logits

    request = layout.row_request[rows]
    on_device = rows.to(logits.device)
    x = logits[on_device].float()
    temperature = sampling.temperature.to(request.device)[request]
    if (min_p > 0).any():
        scores, _ = scale(x, temperature.to(x.device), torch.float32)
        log_min_p = min_p[request].to(x.device).log()  # scores are log(p / largest p)
        x.masked_fill_(scores < log_min_p[:, None], -torch.inf)
    index = searched[request].nonzero()[:, 0]
    if index.shape[0] > 0:
        request, temperature, index = request[index], temperature[index], index.to(x.device)
        parameters = (values.to(x.device) for values in (temperature, top_k[request], top_p[request]))
        chosen = x[index]
        x[index] = chosen.masked_fill_(chosen < _threshold(chosen, *parameters), -torch.inf)
    return logits.index_copy(0, on_device, x.to(logits.dtype))


def _in_use(values: Tensor | None, sampled: Tensor, off: float, used: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the parameter [B], `off` for requests that do not use it."""
    if values is None:
        return torch.full(sampled.shape, off, device=sampled.device)
    values = values.to(sampled.device)
    return torch.where(sampled & used(values), values, off)


def _threshold(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit [N, 1] that top-k and then top-p keep in each row."""
    ordered = _descending(x)
    kth = ordered.gather(1, top_k.long()[:, None] - 1)
    if not (top_p < 1).any():
        return kth
    scores, _ = scale(ordered.masked_fill(ordered < kth, -torch.inf), temperature, torch.float32)
    mass = scores.softmax(-1).cumsum(-1)
    size = (mass < top_p[:, None]).sum(-1, keepdim=True)  # tokens before top_p is reached
    last = ordered.gather(1, size.clamp(max=x.shape[1] - 1))
    return torch.maximum(kth, last)


def _descending(x: Tensor) -> Tensor:
    """Return each row's values in descending order; on the CPU with numpy's sort, which is much faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy())).flip(-1)
    return x.sort(-1, descending=True).values
