"""Closed forms of acceptance for a target distribution p and a draft distribution q."""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) in float64, [..., V]; at temperature 0 one-hot at the largest logit."""
    wide = logits.double()
    if temperature == 0:
        return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    return (wide / temperature).softmax(-1)


def draft_probabilities(logits: Tensor, temperature: float, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return q over the target's vocabulary, [..., vocab_size].

    Args:
        logits: [..., V_draft], -inf for tokens that are never drafted.
        token_ids: [V_draft] int64, target ids of the columns; None if both vocabularies are the same.
    """
    own = probabilities(logits, temperature)
    if token_ids is None:
        return own
    whole = own.new_zeros(*own.shape[:-1], vocab_size)
    return whole.index_copy_(-1, token_ids, own)


def at_draft(p: Tensor, drafts: Tensor) -> Tensor:
    """Return p(x) of the drafts x, [...]: the acceptance of the one-hot test for given drafts."""
    return p.gather(-1, drafts[..., None])[..., 0]


def one_hot(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of p q: the acceptance of the one-hot test for drafts from q."""
    return (p * q).sum(-1)


def with_logits(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of min(p, q) = 1 - TV(p, q): standard rejection sampling (Leviathan et al., 2211.17192)."""
    return torch.minimum(p, q).sum(-1)


def coupled(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that Gumbel-max samples of p and q with the same noise are equal (Daliri, 2408.07978).

    With exponential noise E, token x wins both races if E_y >= E_x max(p_y / p_x, q_y / q_x) for every y, which has
    probability 1 / sum_y max(p_y / p_x, q_y / q_x). In descending order of p / q, the maximum is p's up to x and q's
    after x.
    """
    ratio = torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), torch.inf)
    order = torch.where((p > 0) & (q > 0), ratio, torch.where(p > 0, torch.inf, 0.0)).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_before = p.cumsum(-1)
    q_beyond = q.flip(-1).cumsum(-1).flip(-1) - q
    both = p * q
    return torch.where(both > 0, both / (q * p_before + p * q_beyond), 0.0).sum(-1)


def block(p_of_drafts: Tensor, q_of_drafts: Tensor) -> Tensor:
    """Return the probability that block verification accepts at least the first i of given drafts, [..., k].

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), w_0 = 1, with p and q along the drafts' path (Sun et al., 2403.10444). The
    mean of w_1 over drafts from q is 1 - TV; with a one-hot q, w_i is the product of the p(x_i).
    """
    weights = []
    weight = torch.ones_like(p_of_drafts[..., 0])
    for p, q in zip(p_of_drafts.unbind(-1), q_of_drafts.unbind(-1), strict=True):
        weight = (weight * p / q).clamp_max(1.0)
        weights.append(weight)
    return torch.stack(weights, -1)
