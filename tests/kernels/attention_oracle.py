"""Random sequences in a paged cache, with NaN in all other slots, and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire_kernels import BLOCK_SIZE, RaggedBatch, SequenceRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    size_v: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    anchored: bool = False

    @property
    def scale(self) -> float:
        return self.size**-0.5


class Sequence:
    """All rows of a sequence, and the blocks that hold them."""

    def __init__(self, shape: Shape, length: int, blocks: list[int], generator: torch.Generator) -> None:
        def rows(heads: int, size: int) -> Tensor:
            return torch.randn(length, heads, size, generator=generator).to(shape.dtype)

        # Scores are spread, so that a wrong row or position changes the result.
        self.q, self.k = rows(shape.heads, shape.size) * 3, rows(shape.kv_heads, shape.size)
        self.v = rows(shape.kv_heads, shape.size_v)
        self.shape, self.length, self.blocks = shape, length, blocks

    @property
    def slots(self) -> Tensor:
        blocks = torch.tensor(self.blocks)
        return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: self.length]

    def attended(self, count: int) -> Tensor:
        """Return the attention of the last `count` rows, [count, H, Dv] float64."""
        shape, repeats = self.shape, self.shape.heads // self.shape.kv_heads
        k, v = (x.double().repeat_interleave(repeats, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = shape.scale * self.q[self.length - count :].double().transpose(0, 1) @ k.transpose(1, 2)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        query, key = torch.arange(self.length - count, self.length)[:, None], torch.arange(self.length)
        seen = (key <= query) if shape.causal else (key >= 0).expand(count, -1)
        if shape.window is not None:
            seen = seen & (key > (query[:1] if shape.anchored else query) - shape.window)
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class Scene:
    """Sequences given as (length, count): the last `count` rows are in the batch, the earlier rows are cached."""

    def __init__(self, shape: Shape, sequences: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // BLOCK_SIZE) for length, _ in sequences]
        order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
        self.shape, self.counts = shape, [count for _, count in sequences]
        self.sequences = []
        for (length, _), blocks in zip(sequences, needed, strict=True):
            self.sequences.append(Sequence(shape, length, [order.pop() for _ in range(blocks)], generator))
        slots = (sum(needed) + 4) * BLOCK_SIZE
        self.keys = torch.full((slots, shape.kv_heads, shape.size), torch.nan, dtype=shape.dtype)
        self.values = torch.full((slots, shape.kv_heads, shape.size_v), torch.nan, dtype=shape.dtype)
        self.filled_keys, self.filled_values = self.keys.clone(), self.values.clone()
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            cached = sequence.length - count
            for keys, values, end in ((self.keys, self.values, cached), (self.filled_keys, self.filled_values, None)):
                keys[sequence.slots[:end]] = sequence.k[:end]
                values[sequence.slots[:end]] = sequence.v[:end]

    def rows(self) -> list[SequenceRows]:
        return [
            SequenceRows(sequence.blocks, sequence.length - count, count)
            for sequence, count in zip(self.sequences, self.counts, strict=True)
        ]

    def batch(self, device: torch.device = DEVICE) -> RaggedBatch:
        return RaggedBatch(self.rows(), device)

    def inputs(self, num_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, keys and values; padding rows up to `num_rows` are NaN."""

        def joined(name: str) -> Tensor:
            pieces = [
                getattr(sequence, name)[sequence.length - count :]
                for sequence, count in zip(self.sequences, self.counts, strict=True)
            ]
            padding = 0 if num_rows is None else num_rows - sum(self.counts)
            return torch.cat([*pieces, pieces[0].new_full((padding, *pieces[0].shape[1:]), torch.nan)]).to(DEVICE)

        return joined("q"), joined("k"), joined("v"), self.keys.to(DEVICE, copy=True), self.values.to(DEVICE, copy=True)

    def expected(self) -> Tensor:
        return torch.cat([s.attended(count) for s, count in zip(self.sequences, self.counts, strict=True)])

    def check(self, out: Tensor, keys: Tensor, values: Tensor) -> None:
        """Check `out` against the oracle, and that only the batch's slots and block 0 of the cache have changed."""
        check_close(out, self.expected())
        for changed, filled in ((keys, self.filled_keys), (values, self.filled_values)):
            torch.testing.assert_close(changed.cpu()[BLOCK_SIZE:], filled[BLOCK_SIZE:], rtol=0, atol=0, equal_nan=True)


def check_close(out: Tensor, expected: Tensor) -> None:
    """Check `out` within the dtype's rounding, for values of variance 1. Half precision also rounds the weights."""
    error = (out.cpu().double() - expected).square().mean(-1).sqrt()
    limit = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
    assert error.max() < limit, f"{error.max():.2e} in row {error.max(-1).values.argmax().item()}"
