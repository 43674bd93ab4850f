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

    Padding has any values where nothing else is said.
    """

    proposal_keys: Any  # [N] int64
    tokens: Any  # [T] int32, x_{i+1} of every row, sequence after sequence
    cu_rows: Any  # [N + 1] int32, prefix sums of the sequences' rows; rows past the last sum are padding
    first_positions: Any  # [N] int32, position of each sequence's first row here
    first_places: Any  # [N] int32, its place in the sequence's blocks
    slots: Any  # [N] int32, the sequence's row of the block tables; -1 for padding
    num_drafts: Any  # [N] int32, drafts wanted; 0 for padding
    temperatures: Any  # [N] float32
    new_blocks: Any  # [N, C] int32, blocks from that of the first place on; 0 for none


def num_new_blocks(rows_each: int) -> int:
    """Return how many blocks hold so many rows, from any place of the first one on."""
    return (BLOCK_SIZE - 1 + rows_each - 1) // BLOCK_SIZE + 1


class PackedInputs:
    """The same memory for every step; what a step uses of it depends on N and T alone, so that it can be captured."""

    def __init__(self, max_sequences: int, max_rows: int, rows_each: int, device: torch.device) -> None:
        """Make room for so many sequences and accepted rows; `rows_each` as of `HeadSpec.rows_of_step`."""
        self.num_new_blocks = num_new_blocks(rows_each)
        size = self._layout(max_sequences, max_rows)[-1]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if is_cuda else self._host
        self._views = lru_cache(self._make_views)

    def host(self, num_sequences: int, num_rows: int) -> LoopInputs:
        """Return the arrays to be filled."""
        return self._views(num_sequences, num_rows)[0]

    def device(self, num_sequences: int, num_rows: int) -> LoopInputs:
        """Return the tensors that `send` fills, always at the same addresses for the same sizes."""
        return self._views(num_sequences, num_rows)[1]

    def send(self, num_sequences: int, num_rows: int) -> None:
        """Copy the arrays of `host`, which must not change before the copy is done."""
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
        """Return where each input begins, and the end, in int32."""
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
    """Write the rows of S sequences: `counts` [S] of each and their tokens [T]; the rest is padding."""
    count, num_rows = len(counts), len(tokens)
    host.tokens[:num_rows] = tokens
    np.add.accumulate(counts, out=host.cu_rows[1 : count + 1])
    host.cu_rows[count + 1 :] = num_rows
