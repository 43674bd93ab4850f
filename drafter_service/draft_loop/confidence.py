"""The confidence of a draft, which is independent of the drafted token."""

from __future__ import annotations

import torch

from drafter_service.heads.operations import uses_triton


def max_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the highest probability of each row's distribution, at temperature 1.

    Whether a draft is verified may depend on this value: it is a function of the draft's distribution, not of the draft
    (DSpark, arXiv 2607.05147, appendix A).

    Args:
        logits: [N, V_draft] of any floating-point type.

    Returns:
        [N] float32 in [0, 1]; 0 for invalid logits.
    """
    if uses_triton(logits):
        from drafter_service.draft_loop import kernels

        return kernels.max_probability(logits)
    highest = logits.float().softmax(-1).amax(-1)
    return highest.nan_to_num_(0.0)
