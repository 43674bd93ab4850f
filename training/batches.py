"""The batches of a training run: conversations with the target's states."""

from typing import NamedTuple

import torch
from torch import Tensor

from training.generate import Texts
from training.target import Target


class Batch(NamedTuple):
    """Conversations of one training step.

    Attributes:
        tokens: Token ids, [B, L] int64.
        own: Mask of answer tokens, [B, L] bool.
        states: The target's states that are the head's features, [B, L, n * hidden].
        final: The input of the target's lm_head, [B, L, hidden].
    """

    tokens: Tensor
    own: Tensor
    states: Tensor
    final: Tensor


class Batches:
    """All conversations in batches that are reshuffled every epoch.

    The states are kept on the target's device if those of all conversations take at most `most_bytes`, so that the
    target runs once per conversation. Else they are computed at every step.
    """

    def __init__(self, texts: Texts, target: Target, entered: list[int], size: int, most_bytes: float = 0) -> None:
        self.texts, self.target, self.entered = texts, target, entered
        count, length = texts.tokens.shape
        self.size = min(size, count)
        self.per_epoch = count // self.size
        self.epoch = -1
        self.known = torch.zeros(count, dtype=torch.bool)  # not on the device: __getitem__ decides by it
        hidden, like = target.output.shape[1], target.output
        needed = count * length * (len(entered) + 1) * hidden * like.element_size()
        self.kept: tuple[Tensor, Tensor] | None = None
        if needed <= most_bytes:
            widths = (len(entered) * hidden, hidden)
            self.kept = (like.new_empty(count, length, widths[0]), like.new_empty(count, length, widths[1]))
        print(f"{needed / 2**30:.1f} GiB of states, {'not ' * (self.kept is None)}kept", flush=True)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a training step."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.order = torch.randperm(len(self.known), generator=torch.Generator().manual_seed(epoch))
            self.epoch = epoch
        chosen = self.order[index * self.size : (index + 1) * self.size]
        rows = chosen.to(self.target.device, non_blocking=True)
        tokens, own = self.texts.tokens[rows].long(), self.texts.own[rows]
        if self.kept is not None and self.known[chosen].all():
            return Batch(tokens, own, self.kept[0][rows], self.kept[1][rows])
        states, final = self.target.states(tokens, self.entered)
        if self.kept is not None:
            self.kept[0][rows], self.kept[1][rows] = states, final
            self.known[chosen] = True
        return Batch(tokens, own, states, final)
