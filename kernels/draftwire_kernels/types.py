"""Structs that the public functions take and return."""

from typing import NamedTuple

import torch
from torch import Tensor


class StreamKeys(NamedTuple):
    """Keys of a request's three independent noise streams, each int64 [B].

    ``proposal`` is for the drafter, ``accept`` for acceptance, and ``resample`` for the tokens that the verifier
    samples. ``accept`` and ``resample`` never leave the verifier, except that drafters sample with ``resample`` for the
    method "coupled".
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
        int64 target ids of the columns: None for n = V (dense), [n] for a reduced draft vocabulary, [R - B, n] if each
        row has its own top n. q is 0 for other ids.
    """

    logits: Tensor
    token_ids: Tensor | None = None


class RejectionResult(NamedTuple):
    """The tokens that a verify step emits.

    Attributes
    ----------
    tokens : Tensor
        int64 [B, k_max + 1], the emitted tokens of each request, padded with -1.
    num_emitted : Tensor
        int32 [B], 1 .. k_b + 1, or fewer if a row without a distribution was reached: the tokens emitted before that
        row.
    """

    tokens: Tensor
    num_emitted: Tensor
