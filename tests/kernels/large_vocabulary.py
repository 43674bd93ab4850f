"""Rows long enough that the filter kernel gathers logits, and a check of filtered rows against the oracle."""

import numpy as np
import sampling_oracle as oracle
import torch
from sampling_oracle import Options
from torch import Tensor

from draftwire_kernels import LogitsSampling

VOCAB = 20000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILTERS = (
    Options(top_k=5),
    Options(top_k=50, top_p=0.8, min_p=0.01),
    Options(top_k=9000),  # more than an eighth of the row, the kernel's limit for gathering
    Options(top_k=9000, top_p=0.7),
    Options(top_p=0.5, temperature=0.7),
    Options(top_p=0.98, temperature=3.0),
    Options(min_p=0.2, top_p=0.9),
)
_COUNT = 7


def rows(dtype: torch.dtype) -> Tensor:
    """Return logits [7, VOCAB]: normal; heavy-tailed; narrow and far from 0; mostly -inf; of few distinct values; with
    infinite logits; crowded below the largest."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((_COUNT, VOCAB)).astype(np.float32) * 3
    x[1] = x[1] ** 3 / 9
    x[2] = x[2] / 30 + 100
    x[3, 5:] = -np.inf
    x[4] = np.round(x[4] / 4)
    x[5, ::3], x[5, 1] = -np.inf, np.inf
    x[6] = -(x[6] ** 2)
    return torch.from_numpy(x).to(dtype)


def sampling(options: Options) -> LogitsSampling:
    """Return sampling parameters with the same filters for every row."""
    return LogitsSampling(
        cu_rows=torch.arange(_COUNT + 1, dtype=torch.int32),
        temperature=torch.full((_COUNT,), options.temperature),
        top_k=torch.full((_COUNT,), options.top_k, dtype=torch.int32),
        top_p=torch.full((_COUNT,), options.top_p),
        min_p=torch.full((_COUNT,), options.min_p),
    )


def check(logits: Tensor, out: Tensor, options: Options) -> None:
    """Check that `out` has the logits that the oracle keeps, and -inf elsewhere."""
    assert out.dtype == logits.dtype
    for row, found in zip(logits, out, strict=True):
        finite = row.double().clamp(max=torch.finfo(torch.float32).max).numpy()
        kept = torch.from_numpy(oracle.processed(finite, options, [], []) > -np.inf)
        assert torch.equal(found, row.masked_fill(~kept, -torch.inf))
