"""Inputs of a draft step, packed for one copy to the device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwire.model.kv_cache import BLOCK_SIZE

_ALIGNMENT = 4  # int32; kernels load vectors of 16 bytes


class LoopInputs(NamedTuple):
    """N sequences with T rows, padding included; numpy arrays on the host, tensors on the device.

    Values of padding are arbitrary unless stated below.
    """

    proposal_keys: Any  # [N] int64
    tokens: Any  # [T] int32, x_{i+1} of every row, grouped by sequence
    cu_rows: Any  # [N + 1] int32, prefix sums of the sequences' rows; rows past the last sum are padding
    first_positions: Any  # [N] int32, position of each sequence's first row in the step
    first_places: Any  # [N] int32, its place in the sequence's blocks
    slots: Any  # [N] int32, the sequence's row of the block tables; -1 for padding
    num_drafts: Any  # [N] int32, drafts wanted; 0 for padding
    temperatures: Any  # [N] float32
    new_blocks: Any  # [N, C] int32, blocks from that of the first place on; 0 for none


def num_new_blocks(rows_each: int) -> int:
    """Return the most blocks that `rows_each` consecutive rows of a sequence can touch."""
    return (BLOCK_SIZE - 1 + rows_each - 1) // BLOCK_SIZE + 1


class PackedInputs:
    """Inputs at fixed addresses, which depend on N and T only, so that a step can be captured."""

    def __init__(self, max_sequences: int, max_rows: int, rows_each: int, device: torch.device) -> None:
        """`max_rows` is for accepted rows; `rows_each` as of `HeadSpec.rows_of_step`."""
        self.num_new_blocks = num_new_blocks(rows_each)
        size = self._layout(max_sequences, max_rows)[-1]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if is_cuda else self._host
        self._views = lru_cache(self._make_views)

    def host(self, num_sequences: int, num_rows: int) -> LoopInputs:
        """Return the arrays to fill."""
        return self._views(num_sequences, num_rows)[0]

    def device(self, num_sequences: int, num_rows: int) -> LoopInputs:
        """Return the tensors that `send` fills, always at the same addresses for the same sizes."""
        return self._views(num_sequences, num_rows)[1]

    def send(self, num_sequences: int, num_rows: int) -> None:
        """Copy the arrays of `host` to the device; they must not change before the end of the copy."""
        if self._device is not self._host:
            size = self._layout(num_sequences, num_rows)[-1]
            self._device[:size].copy_(self._host[:size], non_blocking=True)

    def clear(self, num_sequences: int, num_rows: int) -> None:
        """Set all inputs to padding."""
        host = self.host(num_sequences, num_rows)
        host.cu_rows[:] = 0
        host.slots[:] = -1
        host.num_drafts[:] = 0

    def _layout(self, num_sequences: int, num_rows: int) -> list[int]:
        """Return the offset of each input, and the end, in int32 elements."""
        n = num_sequences
        ends = [0]
        for size in (2 * n, num_rows, n + 1, n, n, n, n, n, n * self.num_new_blocks):
            ends.append(-(-(ends[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        return ends

    def _make_views(self, num_sequences: int, num_rows: int) -> tuple[LoopInputs, LoopInputs]:
        host = self._slices(self._host, num_sequences, num_rows)
        return LoopInputs(*(view.numpy() for view in host)), self._slices(self._device, num_sequences, num_rows)

    def _slices(self, buffer: torch.Tensor, n: int, num_rows: int) -> LoopInputs:
        begins = self._layout(n, num_rows)

        def part(index: int, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return buffer[begins[index] : begins[index] + size].view(dtype)

        return LoopInputs(
            proposal_keys=part(0, 2 * n, torch.int64),
            tokens=part(1, num_rows),
            cu_rows=part(2, n + 1),
            first_positions=part(3, n),
            first_places=part(4, n),
            slots=part(5, n),
            num_drafts=part(6, n),
            temperatures=part(7, n, torch.float32),
            new_blocks=part(8, n * self.num_new_blocks).view(n, self.num_new_blocks),
        )


def fill(
    host: LoopInputs,
    *,
    proposal_keys: np.ndarray,
    first_positions: np.ndarray,
    first_places: np.ndarray,
    slots: np.ndarray,
    num_drafts: np.ndarray,
    temperatures: np.ndarray,
    new_blocks: np.ndarray,
) -> None:
    """Write the inputs of S sequences that do not depend on their rows; other sequences become padding."""
    count = len(slots)
    host.cu_rows[0] = 0
    host.proposal_keys[:count] = proposal_keys
    host.first_positions[:count] = first_positions
    host.first_places[:count] = first_places
    host.slots[:count] = slots
    host.num_drafts[:count] = num_drafts
    host.temperatures[:count] = temperatures
    host.new_blocks[:count] = new_blocks
    host.slots[count:] = -1
    host.num_drafts[count:] = 0


def fill_rows(host: LoopInputs, counts: np.ndarray, tokens: np.ndarray) -> None:
    """Write the rows of S sequences: their counts [S] and tokens [T]; all other rows become padding."""
    count, num_rows = len(counts), len(tokens)
    host.tokens[:num_rows] = tokens
    np.add.accumulate(counts, out=host.cu_rows[1 : count + 1])
    host.cu_rows[count + 1 :] = num_rows
