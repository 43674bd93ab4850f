"""Temperature-scaled distributions of logit rows, and samples from them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwire_kernels.noise import GROUP
from draftwire_kernels.reference.noise import group_state, gumbel_noise, row_state


def compute_dtype(use_fp64: bool) -> torch.dtype:
    return torch.float64 if use_fp64 else torch.float32


def maybe_any(flags: Tensor) -> bool:
    """Return whether any flag is set; always True on an accelerator, where reading flags would synchronise."""
    return bool(flags.any()) if flags.device.type == "cpu" else True


def scale(logits: Tensor, temperature: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scores whose softmax is the distribution, and which rows have one.

    Scores are (logits - row maximum) / temperature, so at most 0 and precise for logits of any size; at temperature 0
    they are not divided. An infinite logit is treated as the largest finite one. A row with NaN or with only -inf has
    no distribution.
    """
    x = logits.to(dtype)
    top = x.amax(-1, keepdim=True).clamp_(max=torch.finfo(dtype).max)
    divisor = torch.where(temperature > 0, temperature, 1.0).to(dtype)
    scores = (x - top).div_(divisor[:, None]).clamp_(max=0)
    return scores, top[:, 0] > -torch.inf


def add_noise(
    scores: Tensor, temperature: Tensor, key: Tensor, position: Tensor, offset: Tensor | int, token_ids: Tensor | None
) -> Tensor:
    """Return the scores plus Gumbel noise in rows with a positive temperature; may reuse the memory of `scores`."""
    sampled = temperature > 0
    if not maybe_any(sampled):
        return scores
    if token_ids is None:
        ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    else:
        ids = token_ids.to(torch.int32)
    noise = gumbel_noise(row_state(key, position, offset), ids, scores.dtype)
    return noise.mul_(sampled[:, None]).add_(scores)


def draw(scores: Tensor, temperature: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """Sample tokens [B] from exp(scores) [B, V] in two races, of groups and of the winner's tokens; at temperature 0
    return the argmax."""
    sampled = temperature > 0
    if not maybe_any(sampled):
        return scores.argmax(-1)
    rows, vocab = scores.shape
    state = row_state(key, position, 0)
    grouped = pad(scores, (0, -vocab % GROUP), value=-torch.inf).view(rows, -1, GROUP)
    groups = torch.arange(grouped.shape[1], dtype=torch.int32, device=scores.device)
    group = (grouped.logsumexp(-1) + gumbel_noise(group_state(state), groups, scores.dtype)).argmax(-1)
    tokens = group[:, None] * GROUP + torch.arange(GROUP, device=scores.device)
    noisy = grouped[torch.arange(rows, device=scores.device), group] + gumbel_noise(state, tokens.int(), scores.dtype)
    drawn = tokens.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    return torch.where(sampled, drawn, scores.argmax(-1))


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    draft_offset: Tensor | int,
    token_ids: Tensor | None,
    use_fp64: bool,
) -> Tensor:
    scores, valid = scale(logits, temperature, compute_dtype(use_fp64))
    tokens = add_noise(scores, temperature, key, position, draft_offset, token_ids).argmax(-1)
    return torch.where(valid, tokens, -1)
