"""Token files, and windows drawn from them on the device."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_tokens(path: Path, device: torch.device | str) -> Tensor:
    """A file of uint16 tokens as one int32 tensor."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)


class Windows:
    """Batches of windows of one length; every epoch shifts and shuffles them anew, and depends on its number alone."""

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int = 0) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.count = (len(tokens) - length) // length
        self.batches = self.count // batch
        self.epoch = -1
        self.span = torch.arange(length, device=tokens.device)

    def __getitem__(self, step: int) -> Tensor:
        """Batch number `step` of an endless run, [batch, length] int64."""
        epoch, index = divmod(step, self.batches)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            shift = int(torch.randint(self.length, (), generator=generator))
            order = torch.randperm(self.count, generator=generator)
            self.starts = (order * self.length + shift).to(self.tokens.device)
            self.epoch = epoch
        starts = self.starts[index * self.batch : (index + 1) * self.batch]
        return self.tokens[starts[:, None] + self.span].long()


class Sequences:
    """Batches of whole sequences from [N, L]; every epoch shuffles them anew, and depends on its number alone."""

    def __init__(self, sequences: Tensor, batch: int) -> None:
        self.sequences, self.batch = sequences, batch
        self.batches = len(sequences) // batch
        self.epoch = -1

    def __getitem__(self, step: int) -> Tensor:
        """Batch number `step` of an endless run, [batch, L] int64."""
        epoch, index = divmod(step, self.batches)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(epoch)
            self.order = torch.randperm(len(self.sequences), generator=generator).to(self.sequences.device)
            self.epoch = epoch
        return self.sequences[self.order[index * self.batch : (index + 1) * self.batch]].long()


def learning_rate(progress: float, warmup: float = 0.01, decay_from: float = 0.45) -> float:
    """Warm-up, plateau and linear decay to zero, as a share of the peak; progress runs from 0 to 1.

    Warmup-stable-decay (MiniCPM, 2404.06395): the plateau makes the schedule independent of where a run was cut.
    """
    if progress < warmup:
        return max(progress, 1e-4) / warmup
    return min(1.0, max(0.0, (1 - progress) / (1 - decay_from)))


def bits(nats: float) -> float:
    return nats / math.log(2)
