"""Block verification, which decides the drafts of a step together.

Source: Sun et al., "Block verification accelerates speculative decoding" (2403.10444), algorithm 2.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwire_kernels.reference.drafts import Draft, Target, residual
from draftwire_kernels.reference.layout import Layout


def block_acceptance(
    target: Target, draft: Draft, usable: Tensor, uniform: Tensor, temperature: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return which drafts are accepted [B, k_max], and the weight of p in the residual after i drafts [B, k_max + 1].

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), i drafts pass if u_i < h_i, where h_i is
    s_i / (s_i + 1 - w_i), s_i the mass of max(w_i p - q, 0) in the row after them (h_i is 1 if w_i is), and h = w after
    the last usable draft. The longest passing prefix is accepted. At temperature 0, w is one or zero as in greedy
    acceptance.
    """
    num_usable = layout.pad(usable, False).long().cumprod(1).sum(1)
    ratio = torch.nan_to_num(layout.pad(draft.p_token / draft.q_token, 0), nan=0.0)
    weights = [ratio.new_ones(layout.num_requests)]
    for i in range(layout.max_drafts):
        weights.append((weights[-1] * ratio[:, i]).clamp_(max=1))
    weight = torch.stack(weights, 1)

    mass = layout.pad(_residual_mass(target, draft, weight, layout), 0)
    share = torch.nan_to_num(mass / (mass + 1 - weight[:, :-1]), nan=1.0)  # h_i for i = 0 .. k_max - 1
    count = torch.arange(1, layout.max_drafts + 1, device=weight.device)
    last = count == num_usable[:, None]
    threshold = torch.where(last, weight[:, 1:], pad(share, (0, 1))[:, 1:])
    passed = (layout.pad(uniform, 1) < threshold) & (count <= num_usable[:, None])
    accepted = pad(passed * count, (1, 0)).amax(1, keepdim=True)
    greedy = (weight[:, 1:] > 0) & (count <= num_usable[:, None])
    return torch.where((temperature > 0)[:, None], count <= accepted, greedy), weight


def _residual_mass(target: Target, draft: Draft, weight: Tensor, layout: Layout) -> Tensor:
    """Return the mass [D] of max(w p - q, 0) in each draft's row, w being the weight after the earlier drafts."""
    assert target.probs is not None
    p = target.probs[layout.draft_row]
    q = draft.q_rows(torch.arange(p.shape[0], device=p.device), p.shape[-1])
    return residual(p, q, weight[layout.draft_request, layout.draft_offset]).sum(-1)
