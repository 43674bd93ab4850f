"""The small structs that the public functions take and return."""

from typing import NamedTuple

import torch
from torch import Tensor


class StreamKeys(NamedTuple):
    """Keys of a request's three independent noise streams, each int64 [B].

    ``proposal`` is the drafter's, ``accept`` decides acceptance and ``resample`` draws every token that the verifier
    itself emits. ``accept`` and ``resample`` never leave the verifier (but for the method "coupled", whose drafter
    samples with ``resample``).
    """

    proposal: Tensor
    accept: Tensor
    resample: Tensor

    def to(self, device: torch.device | str) -> "StreamKeys":
        """Return the same keys on `device`."""
        return StreamKeys(*(key.to(device) for key in self))


class DraftLogits(NamedTuple):
    """Logits of the draft distributions q, one row per draft token, not scaled by the temperature.

    Attributes
    ----------
    logits : Tensor
        float32 [R - B, n].
    token_ids : Tensor or None
        int64 target ids of the columns: None when n = V (dense), [n] for a reduced draft vocabulary, [R - B, n] when
        each row holds its own top n. q is 0 outside them.
    """

    logits: Tensor
    token_ids: Tensor | None = None


class RejectionResult(NamedTuple):
    """The tokens that a verify step emits.

    Attributes
    ----------
    tokens : Tensor
        int64 [B, k_max + 1], the emitted tokens of each request, -1 beyond them.
    num_emitted : Tensor
        int32 [B]. 1 .. k_b + 1, or fewer where a row without a distribution (NaN, or all -inf) was reached: then the
        tokens emitted before it, 0 when it was the request's first row.
    """

    tokens: Tensor
    num_emitted: Tensor
