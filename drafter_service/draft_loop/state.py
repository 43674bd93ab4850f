"""The tensors of a draft step between the head's passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class LoopState(NamedTuple):
    """N sequences with T rows, padding included; fixed addresses, so that a step can be captured.

    The first group of fields is for the pass over the accepted rows, the second for the next pass over one row of each
    sequence, the third for drawing.
    """

    tokens: Any  # [T] int64
    positions: Any  # [T] int64
    slot_mapping: Any  # [T] int64
    lengths: Any  # [N] int32, accepted rows in the cache
    block_tables: Any  # [N, W] int32
    last_rows: Any  # [N] int64, row of each sequence's last accepted row

    next_tokens: Any  # [N] int64
    next_positions: Any  # [N] int64
    next_slots: Any  # [N] int64
    next_lengths: Any  # [N] int32

    draw_positions: Any  # [N] int64, position of the token being drawn
    results: Any  # [N, K, 2] int32, of each draft `drafts` and the bits of `confidences`

    @classmethod
    def allocate(
        cls, max_sequences: int, max_rows: int, max_blocks: int, max_drafts: int, device: torch.device
    ) -> LoopState:
        """Allocate the state for steps of at most this size; `max_blocks` and `max_drafts` are per sequence."""
        n = max_sequences

        def wide(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def narrow(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            *(wide(max_rows), wide(max_rows), wide(max_rows), narrow(n), narrow(n, max_blocks), wide(n)),
            *(wide(n), wide(n), wide(n), narrow(n), wide(n), narrow(n, max_drafts, 2)),
        )

    @property
    def drafts(self) -> torch.Tensor:
        """Return the drafts, [N, K] int32 target ids; -1 from the first draft on that is not wanted or had no
        distribution."""
        return self.results[..., 0]

    @property
    def confidences(self) -> torch.Tensor:
        """Return the confidences, [N, K] float32 (`Drafts.confidences` in draft.proto); undefined in other modes."""
        return self.results.view(torch.float32)[..., 1]

    def view(self, num_sequences: int, num_rows: int) -> LoopState:
        """Return the state of the first sequences and rows."""
        return LoopState(*(part[:num_rows] for part in self[:3]), *(part[:num_sequences] for part in self[3:]))


class BlockState(NamedTuple):
    """R rows of each of N sequences, after their accepted rows."""

    tokens: Any  # [N * R] int64, 0
    positions: Any  # [N * R] int64
    slots: Any  # [N * R] int64
    lengths: Any  # [N] int32, rows in the cache, including these
