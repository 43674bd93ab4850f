"""Losses between a head's and the target's logits over the whole vocabulary, in pieces of `PIECE` rows.

Logits are the largest tensors of training. So the gradient of a piece is computed together with its logits, and only
the gradients of states and weights are kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

PIECE = 4096


class Mixture(NamedTuple):
    """Weights of a row's losses.

    Attributes:
        token: Weight of the cross entropy to the token that the target generated.
        soft: Weight of the cross entropy to the target's distribution.
        distance: Weight of the sum of |q - p| over the vocabulary, twice the total variation.
    """

    token: float
    soft: float
    distance: float


EAGLE3 = Mixture(token=0.0, soft=1.0, distance=0.0)  # 2503.01840, and EAGLE's training code
DSPARK = Mixture(token=0.1, soft=0.0, distance=0.9)  # 2607.05147, and deepseek-ai/DeepSpec


class RowStatistics(NamedTuple):
    """Loss and agreement with the target of each row, each field [R] float32.

    Attributes:
        loss: Weighted sum of the losses of `Mixture`.
        accept: 1 - total variation, the probability that a draft sampled from the head is accepted.
        hit: 1 if head and target have the same most likely token, else 0.
    """

    loss: Tensor
    accept: Tensor
    hit: Tensor


def row_terms(
    logits: Tensor, teacher: Tensor, tokens: Tensor, weights: Tensor, mixture: Mixture
) -> tuple[Tensor, RowStatistics]:
    """Return the gradient of each row's weighted loss with respect to its logits, and the rows' statistics.

    logits and teacher: [R, V]. tokens: [R] int64. weights: [R] float32. The gradient has the logits' shape and dtype.
    """
    scores, wanted = logits.float(), teacher.float()
    normaliser = scores.logsumexp(-1, keepdim=True)
    q = (scores - normaliser).exp()
    p = wanted.softmax(-1)
    difference = q - p
    distance = difference.abs().sum(-1)
    sign = difference.sign()
    written = torch.arange(scores.shape[1], device=scores.device) == tokens[:, None]
    gradient = mixture.token * (q - written.float()) + mixture.soft * difference
    gradient = gradient + mixture.distance * q * (sign - (sign * q).sum(-1, keepdim=True))
    loss = mixture.token * (normaliser.squeeze(-1) - scores.gather(1, tokens[:, None]).squeeze(-1))
    loss = loss + mixture.soft * (normaliser.squeeze(-1) - (p * scores).sum(-1)) + mixture.distance * distance
    hit = (scores.argmax(-1) == wanted.argmax(-1)).float()
    return (gradient * weights[:, None]).to(logits.dtype), RowStatistics(loss, 1 - distance / 2, hit)


Terms = Callable[[Tensor, Tensor, Tensor, Tensor, Mixture], tuple[Tensor, RowStatistics]]


class Rows(NamedTuple):
    """Rows of one loss.

    Attributes:
        inputs: The head's states before lm_head, [R, hidden]; with a Markov head followed by its output before W2,
            [R, hidden + rank].
        teacher: The target's states before lm_head, [R, hidden].
        tokens: The tokens that the target generated, [R] int64.
        weights: Weight of each row's loss, [R] float32; the content of rows with weight 0 is arbitrary.
    """

    inputs: Tensor
    teacher: Tensor
    tokens: Tensor
    weights: Tensor


class _Distil(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        trained: Tensor | None,
        frozen: Tensor | None,
        fixed: tuple[Rows, Tensor, Mixture, Terms],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, teacher_output, mixture, terms = fixed
        dtype = teacher_output.dtype
        weight = torch.cat([part.to(dtype) for part in (frozen, trained) if part is not None], dim=1)
        d_inputs = torch.empty_like(inputs)
        d_trained = None if trained is None else torch.zeros_like(trained)
        loss = torch.zeros((), device=inputs.device)
        accept, hit = torch.empty_like(rows.weights), torch.empty_like(rows.weights)
        for first in range(0, len(inputs), PIECE):
            piece = slice(first, first + PIECE)
            own = inputs[piece].to(dtype)
            wanted = rows.teacher[piece] @ teacher_output.T
            weighted, statistics = terms(own @ weight.T, wanted, rows.tokens[piece], rows.weights[piece], mixture)
            loss += (statistics.loss * rows.weights[piece]).sum()
            accept[piece], hit[piece] = statistics.accept, statistics.hit
            d_inputs[piece] = (weighted @ weight).to(d_inputs.dtype)
            if d_trained is not None:
                d_trained += weighted.T @ own[:, -d_trained.shape[1] :]
        ctx.gradients = (d_inputs, d_trained)
        ctx.mark_non_differentiable(accept, hit)
        return loss, accept, hit

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients
        return *(None if gradient is None else gradient * d_loss for gradient in gradients), None, None


def distil(
    rows: Rows,
    frozen: Tensor | None,
    trained: Tensor | None,
    teacher_output: Tensor,
    mixture: Mixture,
    terms: Terms = row_terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the weighted losses, and `accept` and `hit` of each row [R] without gradient.

    The logits are the product of `rows.inputs` with the concatenation of `frozen` and `trained`.

    Args:
        rows: The rows.
        frozen: Columns of the output weights without gradient, [V, n]: the target's lm_head; or None.
        trained: Columns with gradient, [V, m]: the head's own lm_head, or W2 of the Markov head; or None.
        teacher_output: The target's lm_head over the head's vocabulary, [V, hidden]. Products have its dtype.
        mixture: Weights of the losses.
        terms: `row_terms` or its compiled form.
    """
    count = len(rows.tokens)
    # Pad to pieces of one size, so that `terms` is compiled once.
    missing = -count % min(PIECE, 64 * max(1, -(-count // 64)))
    rows = Rows(*(F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) for x in rows))
    loss, accept, hit = _Distil.apply(rows.inputs, trained, frozen, (rows, teacher_output, mixture, terms))
    return loss, accept[:count], hit[:count]
