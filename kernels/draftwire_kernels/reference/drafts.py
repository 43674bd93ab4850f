"""Probabilities of the drafts under p and q, and residuals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire_kernels.reference.distribution import maybe_any, scale
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.types import DraftLogits


@dataclass(frozen=True)
class Target:
    """Target rows of the whole batch."""

    scores: Tensor  # [R, V], see `scale`
    probs: Tensor | None  # [R, V], None if no request samples
    valid: Tensor  # [R] bool, whether the row has a distribution


@dataclass(frozen=True)
class Draft:
    """Drafts with their probabilities; without draft logits q is one-hot and `q_token` is 1."""

    tokens: Tensor  # [D] int64, clamped into the vocabulary
    p_token: Tensor  # [D], p of the draft; at temperature 0 one or zero
    q_token: Tensor  # [D], q of the draft; at temperature 0 one
    ended: Tensor  # [D] bool, whether this draft ends the request's drafts
    q: Tensor | None  # [D, n], probabilities of the draft logits' columns
    token_ids: Tensor | None  # [n] or [D, n], their target ids; None for dense

    def q_rows(self, index: Tensor, vocab: int) -> Tensor:
        """Return q of the given drafts over the target's vocabulary: [len(index), vocab]."""
        assert self.q is not None
        q = self.q[index]
        if self.token_ids is None:
            return q
        ids = self.token_ids[index] if self.token_ids.ndim == 2 else self.token_ids.expand_as(q)
        inside = (ids >= 0) & (ids < vocab)
        full = q.new_zeros(q.shape[0], vocab)
        return full.scatter_add_(1, ids.clamp(0, vocab - 1), torch.where(inside, q, 0))


def target_rows(logits: Tensor, temperature: Tensor, layout: Layout, dtype: torch.dtype) -> Target:
    scores, valid = scale(logits, temperature[layout.row_request], dtype)
    return Target(scores, scores.softmax(-1) if maybe_any(temperature > 0) else None, valid)


def draft_rows(
    tokens: Tensor, target: Target, temperature: Tensor, layout: Layout, draft_logits: DraftLogits | None
) -> Draft:
    vocab = target.scores.shape[-1]
    ended = (tokens < 0) | (tokens >= vocab)
    tokens = tokens.clamp(0, vocab - 1)
    greedy = ~(temperature > 0)[layout.draft_request]
    p_token = _target_probability(tokens, target, greedy, layout)
    q_token = torch.ones_like(p_token)
    if draft_logits is None or target.probs is None:
        return Draft(tokens, p_token, q_token, ended, None, None)
    scores, _ = scale(draft_logits.logits, temperature[layout.draft_request], p_token.dtype)
    q = scores.softmax(-1)
    if draft_logits.token_ids is None:
        q_sampled = q.gather(1, tokens[:, None])[:, 0]
    else:
        q_sampled = torch.where(draft_logits.token_ids == tokens[:, None], q, 0).sum(-1)
    q_token = torch.where(greedy, q_token, q_sampled)
    ended = ended | ~(q_token > 0)  # NaN ends the drafts too
    return Draft(tokens, p_token, q_token, ended, q, draft_logits.token_ids)


def _target_probability(tokens: Tensor, target: Target, greedy: Tensor, layout: Layout) -> Tensor:
    row = layout.draft_row
    sampled = None if target.probs is None else target.probs[row, tokens]
    if sampled is not None and not maybe_any(greedy):
        return sampled
    best = (target.scores[row].argmax(-1) == tokens).to(target.scores.dtype)
    return best if sampled is None else torch.where(greedy, best, sampled)


def without_draft(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the scores [B, V] of the residual of a one-hot q: p without the draft [B]."""
    return scores.scatter(1, tokens[:, None], -torch.inf)


def residual(p: Tensor, q: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the unnormalised residual max(weight * p - q, 0) [B, V]; `weight` [B] is for block verification."""
    scaled = p if weight is None else p * weight[:, None]
    return (scaled - q).clamp_(min=0)
