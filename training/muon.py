"""Muon for stacks of matrices of one shape: momentum, orthogonalised by a Newton-Schulz iteration.

Algorithm and coefficients are those of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). Matrices of
one shape are orthogonalised as one batch, because for small models the kernel launches of single matrices would take
longer than the arithmetic.
"""

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return the approximately nearest semi-orthogonal matrices of [N, rows, columns], in bfloat16 on a GPU."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices  # few CPUs multiply bfloat16 fast
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} has no gradient: every weight must be in the loss")
    return weight.grad


class Muon:
    """Optimizer of matrices; its state is one momentum stack per shape."""

    def __init__(self, weights: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        shapes = sorted({tuple(weight.shape) for weight in weights})
        self.groups: list[list[Tensor]] = [
            [weight for weight in weights if tuple(weight.shape) == shape] for shape in shapes
        ]
        self.moments = [torch.stack([torch.zeros_like(weight) for weight in group]) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, moment in zip(self.groups, self.moments, strict=True):
            gradients = torch.stack([gradient(weight) for weight in group])
            moment.lerp_(gradients, 1 - self.momentum)
            update = orthogonalise(gradients.lerp(moment, self.momentum))  # Nesterov
            rows, columns = update.shape[1:]
            scale = lr * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.to(moment.dtype).unbind()), alpha=-scale)

    def state_dict(self) -> dict:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict) -> None:
        for mine, saved in zip(self.moments, state["moments"], strict=True):
            mine.copy_(saved)
