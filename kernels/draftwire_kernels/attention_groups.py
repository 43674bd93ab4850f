"""Groups sequences of similar sizes in a ragged batch, padded to one shape for torch's attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Group:
    """Sequences padded to [B, Q] rows over [B, L] slots."""

    rows: torch.Tensor  # [B, Q] int64, row of the batch; padding repeats the sequence's first row
    context: torch.Tensor  # [B, L] int64, slot of the cache; padding repeats the sequence's first slot
    query_positions: torch.Tensor  # [B, Q, 1] int64, position in the sequence
    key_positions: torch.Tensor  # [1, 1, L] int64
    starts: torch.Tensor  # [B, 1, 1] int64, position of the sequence's first row in this batch
    lengths: torch.Tensor  # [B, 1, 1] int64, of the sequences, including these rows
    valid: torch.Tensor  # [n] int64, indices in [B * Q] that are not padding
    valid_rows: torch.Tensor  # [n] int64, their rows of the batch
    masks: dict[tuple[int | None, bool, bool], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, causal: bool, anchored: bool) -> torch.Tensor:
        """Return the mask [B, 1, Q, L] bool; the arguments are those of `draftwire_kernels.paged_attention`."""
        kind = window, causal, anchored
        if kind not in self.masks:
            seen = self.key_positions <= self.query_positions
            if not causal:
                seen = (self.key_positions < self.lengths).expand_as(seen)
            if window is not None:
                seen = seen & (self.key_positions > (self.starts if anchored else self.query_positions) - window)
            self.masks[kind] = seen[:, None]
        return self.masks[kind]


def groups_of(
    cu_rows: np.ndarray, lengths: np.ndarray, block_tables: np.ndarray, block_size: int, device: torch.device
) -> list[Group]:
    """Group the sequences that have rows, with numbers of rows within a factor of two, and lengths too."""
    members: dict[tuple[int, int], list[int]] = {}
    counts = np.diff(cu_rows)
    for index, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        if count > 0:
            members.setdefault((count.bit_length(), length.bit_length()), []).append(index)
    return [
        _group(cu_rows[group].astype(np.int64), counts[group], lengths[group], block_tables[group], block_size, device)
        for group in members.values()
    ]


def _group(
    first_rows: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> Group:
    query = np.arange(counts.max())
    is_row = query < counts[:, None]
    offset = np.where(is_row, query, 0)
    rows = first_rows[:, None] + offset
    key = np.arange(lengths.max())
    place = np.where(key < lengths[:, None], key, 0)
    blocks = np.take_along_axis(block_tables, place // block_size, 1).astype(np.int64)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Group(
        rows=on_device(rows),
        context=on_device(blocks * block_size + place % block_size),
        query_positions=on_device(((lengths - counts)[:, None] + offset)[:, :, None].astype(np.int64)),
        key_positions=on_device(key[None, None]),
        starts=on_device((lengths - counts)[:, None, None].astype(np.int64)),
        lengths=on_device(lengths[:, None, None].astype(np.int64)),
        valid=on_device(np.flatnonzero(is_row)),
        valid_rows=on_device(rows[is_row]),
    )
