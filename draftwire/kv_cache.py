"""Paged key-value memory and attention over it, shared by the target and the heads.

A cache is a pool of blocks of `block_size` slots; a sequence owns a list of blocks, and roll-back is a shorter length:
rows past it are overwritten. Block 0 belongs to nobody and stays zero; padding reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from draftwire.errors import InvalidArgumentError

BLOCK_SIZE = 16


class BlockPool:
    """Hands out block ids; the only owner of the free list.

    Raises
    ------
    InvalidArgumentError
        When there is not even one block to hand out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidArgumentError("num_blocks", num_blocks, "must be at least 2; block 0 is padding")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks not in use."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, [0, 1]."""
        return 1 - self.num_free / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Takes blocks back."""
        self._free.extend(blocks)


def blocks_for(num_rows: int) -> int:
    """Blocks that hold `num_rows` rows."""
    return -(-num_rows // BLOCK_SIZE)


class KVCache:
    """Keys and values of every layer: per layer one tensor [num_blocks * BLOCK_SIZE, kv_heads, head_size] each."""

    def __init__(
        self,
        layer_shapes: Sequence[tuple[int, int, int]],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layer_shapes` has (kv_heads, key head size, value head size) of each layer."""
        slots = num_blocks * BLOCK_SIZE
        self.keys = [torch.zeros(slots, heads, k, dtype=dtype, device=device) for heads, k, _ in layer_shapes]
        self.values = [torch.zeros(slots, heads, v, dtype=dtype, device=device) for heads, _, v in layer_shapes]


@dataclass(frozen=True)
class SequenceRows:
    """Rows of one sequence in a batch: rows start .. start + count - 1 of the blocks' rows attend to 0 .. their own."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclass
class _Group:
    """Sequences of alike sizes, padded to [B, Q] rows over [B, L] slots."""

    rows: torch.Tensor  # [B, Q] int64, row of the batch; padding repeats the sequence's first row
    context: torch.Tensor  # [B, L] int64, slot of the cache; padding is slot 0
    query_positions: torch.Tensor  # [B, Q, 1] int64, place in the sequence
    key_positions: torch.Tensor  # [1, 1, L] int64
    valid: torch.Tensor  # [n] int64, the places of [B * Q] that are rows
    valid_rows: torch.Tensor  # [n] int64, the rows that they are
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, Q, L] bool, True where a query sees a key."""
        if window not in self.masks:
            seen = self.key_positions <= self.query_positions
            if window is not None:
                seen = seen & (self.key_positions > self.query_positions - window)
            self.masks[window] = seen[:, None]
        return self.masks[window]


class RaggedBatch:
    """Where the rows of a step's sequences are written and what they attend to."""

    def __init__(self, sequences: Sequence[SequenceRows], device: torch.device) -> None:
        slots_of = [_slots(sequence) for sequence in sequences]
        first_row = np.cumsum([0] + [sequence.count for sequence in sequences])
        self.num_rows = int(first_row[-1])
        written = [slots[sequence.start :] for slots, sequence in zip(slots_of, sequences, strict=True)]
        self.slot_mapping = _to_device(np.concatenate(written) if written else np.empty(0, np.int64), device)
        members: dict[tuple[int, int], list[int]] = {}
        for index, sequence in enumerate(sequences):
            key = (sequence.count.bit_length(), (sequence.start + sequence.count).bit_length())
            members.setdefault(key, []).append(index)
        self.groups = [
            _group([sequences[i] for i in group], [slots_of[i] for i in group], first_row[group], device)
            for group in members.values()
        ]


def _slots(sequence: SequenceRows) -> np.ndarray:
    """Slots of the sequence's rows 0 .. start + count - 1."""
    length = sequence.start + sequence.count
    blocks = np.asarray(sequence.blocks[: blocks_for(length)], np.int64)
    return (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:length]


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _group(
    sequences: list[SequenceRows], slots: list[np.ndarray], first_rows: np.ndarray, device: torch.device
) -> _Group:
    counts = np.array([sequence.count for sequence in sequences])
    starts = np.array([sequence.start for sequence in sequences])
    query = np.arange(counts.max())
    is_row = query < counts[:, None]
    offset = np.where(is_row, query, 0)
    rows = first_rows[:, None] + offset
    context = np.zeros((len(sequences), int((starts + counts).max())), np.int64)
    for place, own in zip(context, slots, strict=True):
        place[: len(own)] = own
    return _Group(
        rows=_to_device(rows, device),
        context=_to_device(context, device),
        query_positions=_to_device((starts[:, None] + offset)[:, :, None], device),
        key_positions=_to_device(np.arange(context.shape[1])[None, None], device),
        valid=_to_device(np.flatnonzero(is_row), device),
        valid_rows=_to_device(rows[is_row], device),
    )


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Writes the rows' keys and values into the cache and attends causally over each row's own sequence.

    Parameters
    ----------
    query, key, value
        [T, H, D], [T, KV, D], [T, KV, Dv]; T = batch.num_rows, rotary embedding applied.
    keys, values
        One layer of a `KVCache`; changed in place.
    scale
        Factor of the scores, usually D ** -0.5.
    window
        Size of a sliding window in positions, the row's own included; None for full attention.
    softcap
        Scores become softcap * tanh(score / softcap); None for none.

    Returns
    -------
    torch.Tensor
        [T, H, Dv] of the query's dtype.
    """
    keys.index_copy_(0, batch.slot_mapping, key)
    values.index_copy_(0, batch.slot_mapping, value)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    for group in batch.groups:
        q = query[group.rows].transpose(1, 2)
        k = keys[group.context].transpose(1, 2)
        v = values[group.context].transpose(1, 2)
        mask = group.mask(window)
        if softcap is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            attended = _softcapped(q, k, v, mask, scale, softcap)
        out[group.valid_rows] = attended.transpose(1, 2).flatten(0, 1)[group.valid]
    return out


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)) * scale / softcap)
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v
