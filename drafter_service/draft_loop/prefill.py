"""Rows without drafts after them: those of prompts, backlogs and late steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafter_service.heads.spec import Head, Rows
from drafter_service.limits import EngineLimits
from draftwire.model.batch_sizes import row_counts
from draftwire.model.block_pool import blocks_for
from draftwire.model.devices import upload
from draftwire.model.kv_cache import BatchBuffers, KVCache, RaggedBatch, SequenceRows


class RowFeed:
    """Fills the head's cache. On a GPU batches are padded to few sizes, whose kernels `warm_up` compiles."""

    def __init__(
        self,
        head: Head,
        cache: KVCache,
        limits: EngineLimits,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_padded: bool | None = None,
    ) -> None:
        """`is_padded`: whether batches are padded; None pads them on a GPU only."""
        self._head = head
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._buffers: BatchBuffers | None = None
        self._max_num_seqs = limits.max_num_seqs
        self._sizes = row_counts(limits.max_batch_rows)
        if device.type == "cuda" if is_padded is None else is_padded:
            blocks = blocks_for(limits.max_model_len)
            self._buffers = BatchBuffers(limits.max_batch_rows, limits.max_num_seqs, blocks, device)

    def states(self, num_rows: int) -> Tensor:
        """Return zeros [>= num_rows, hidden] for the states g of at most max_batch_rows rows."""
        shape = (self._padded(num_rows), self._head.spec.hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def run(self, tokens: np.ndarray, positions: np.ndarray, states: Tensor, sequences: Sequence[SequenceRows]) -> None:
        """Launch the computation of rows, without waiting for the device.

        Args:
            tokens, positions: [T] int64: x_{i+1} and i of each row, grouped by sequence.
            states: The tensor of `states` for T rows, filled.
            sequences: The sequences of the rows and their blocks; each sequence once.
        """
        missing = (0, len(states) - len(tokens))
        arrays = [np.pad(tokens, missing), np.pad(positions, missing)] if missing[1] else [tokens, positions]
        if self._buffers is None:
            batch = RaggedBatch(sequences, self._device)
        else:
            num_rows = len(states)
            batch = self._buffers.load(sequences, num_rows, self._max_num_seqs, max_rows=num_rows)
        given_tokens, given_positions = upload(arrays, self._device)
        self._head.enter(Rows(given_tokens, given_positions, batch), states, self._cache)

    def warm_up(self) -> None:
        """Run every size once over padding, so that the first prompts do not wait for their kernels."""
        if self._buffers is not None:
            none = np.zeros(0, np.int64)
            for size in self._sizes:
                self.run(none, none, self.states(size), [])

    def _padded(self, num_rows: int) -> int:
        return num_rows if self._buffers is None else self._sizes[bisect_left(self._sizes, num_rows)]
