"""Verification of drafts: the accepted drafts and the next token."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwire_kernels.reference.block import block_acceptance
from draftwire_kernels.reference.distribution import add_noise, compute_dtype, draw
from draftwire_kernels.reference.drafts import Draft, Target, draft_rows, residual, target_rows, without_draft
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.reference.noise import accept_uniform, select_rates
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys


def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    keys: StreamKeys,
    position: Tensor,
    draft_logits: DraftLogits | None,
    method: str,
    synthetic_rates: Tensor | None,
    use_fp64: bool,
) -> RejectionResult:
    layout = Layout.from_cu_rows(cu_rows, target_logits.shape[0], target_logits.device)
    target = target_rows(target_logits, temperature, layout, compute_dtype(use_fp64))
    if method == "coupled":
        return _coupled(target, draft_tokens, temperature, keys, position, layout)

    draft = draft_rows(draft_tokens, target, temperature, layout, draft_logits)
    accept_key = keys.accept[layout.draft_request]
    draft_position = position[layout.draft_request] + layout.draft_offset
    uniform = accept_uniform(accept_key, draft_position, layout.draft_offset, target.scores.dtype)
    usable = ~draft.ended & target.valid[layout.draft_row]
    weight = None
    if method == "block" and draft.q is not None:
        accept, weight = block_acceptance(target, draft, usable, uniform, temperature, layout)
    elif method == "synthetic":
        assert synthetic_rates is not None
        rates = select_rates(synthetic_rates, accept_key, draft_position, layout.draft_offset)
        accept = layout.pad(usable & (uniform < rates), False)
    else:
        accept = layout.pad(usable & (uniform < draft.p_token / draft.q_token), False)

    accepted = _prefix_length(accept)
    scores = _final_scores(accepted, target, draft, temperature, layout, weight)
    final = draw(scores, temperature, keys.resample, position + accepted)
    return _emit(draft_tokens, accepted, final, target.valid[layout.first_row + accepted], layout)


def _prefix_length(accept: Tensor) -> Tensor:
    """Return the number of drafts before the first rejected one, [B], from flags [B, k_max]."""
    return accept.long().cumprod(1).sum(1)


def _final_scores(
    accepted: Tensor, target: Target, draft: Draft, temperature: Tensor, layout: Layout, weight: Tensor | None
) -> Tensor:
    """Return the scores [B, V] of the token after the accepted drafts [B].

    The scores are those of the residual after a rejection, else of p. p also replaces a residual without mass in
    floating point, where p and q are equal up to rounding.
    """
    row = layout.first_row + accepted
    scores = target.scores[row]
    if target.probs is None or draft.tokens.shape[0] == 0:
        return scores
    index = layout.draft_index(accepted)
    refused = (accepted < layout.num_drafts) & ~draft.ended[index] & target.valid[row] & (temperature > 0)
    if draft.q is None:
        kept = without_draft(scores, draft.tokens[index])
    else:
        q = draft.q_rows(index, scores.shape[-1])
        row_weight = None if weight is None else weight.gather(1, accepted[:, None])[:, 0]
        kept = residual(target.probs[row], q, row_weight).log_()
    has_mass = kept.amax(-1) > -torch.inf
    return torch.where((refused & has_mass)[:, None], kept, scores)


def _coupled(
    target: Target, draft_tokens: Tensor, temperature: Tensor, keys: StreamKeys, position: Tensor, layout: Layout
) -> RejectionResult:
    request = layout.row_request
    row_position = position[request] + torch.arange(request.shape[0], device=request.device) - layout.first_row[request]
    noisy = add_noise(target.scores, temperature[request], keys.resample[request], row_position, 0, None)
    tokens = torch.where(target.valid, noisy.argmax(-1), -1)
    agreed = (tokens[layout.draft_row] == draft_tokens) & (draft_tokens >= 0)
    accepted = _prefix_length(layout.pad(agreed, False))
    row = layout.first_row + accepted
    return _emit(draft_tokens, accepted, tokens[row], target.valid[row], layout)


def _emit(draft_tokens: Tensor, accepted: Tensor, final: Tensor, valid: Tensor, layout: Layout) -> RejectionResult:
    place = torch.arange(layout.max_drafts, device=accepted.device)
    drafts = torch.where(place < accepted[:, None], layout.pad(draft_tokens, -1), -1)
    tokens = pad(drafts, (0, 1), value=-1)
    tokens.scatter_(1, accepted[:, None], torch.where(valid, final, -1)[:, None])
    return RejectionResult(tokens, (accepted + valid).int())
