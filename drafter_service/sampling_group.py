"""Sampling of the rows of one mode within the k-step loop."""

from __future__ import annotations

import numpy as np
import torch

from drafter_service.logits_buffers import LogitsBuffers
from drafter_service.sampling_mode import SamplingMode
from drafter_service.sequence import Sequence
from draftwire_kernels import gumbel_sample


class SamplingGroup:
    """The batch rows of one mode, most drafts first, so that the rows still drafting are the first ones."""

    def __init__(
        self,
        mode: SamplingMode,
        rows: np.ndarray,  # int64 [M], ascending batch rows
        is_whole_batch: bool,
        sequences: list[Sequence],  # [M]
        draft_token_ids: torch.Tensor | None,
        buffers: LogitsBuffers,
        device: torch.device,
    ) -> None:
        self.mode = mode
        self.rows = rows
        self._device_rows = None if is_whole_batch else torch.from_numpy(rows).to(device)
        self._draft_token_ids = draft_token_ids
        self._buffers = buffers
        if mode.gumbel:
            # A draft's noise is keyed by the position of the drafted token: x_{n+1} comes first, n = next_row.
            numbers = np.array([[s.proposal_key for s in sequences], [s.next_row + 1 for s in sequences]], np.int64)
            self._keys, self._positions = torch.from_numpy(numbers).to(device)
            self._temperatures = torch.tensor([s.temperature for s in sequences], dtype=torch.float32, device=device)

    def sample(self, logits: torch.Tensor, offset: int, num_active: int, columns: torch.Tensor) -> None:
        """Draws one token for each of the group's first `num_active` rows.

        Parameters
        ----------
        logits
            [N, V_draft] float32 of the batch rows that still draft.
        offset
            Place of the drawn token among the step's drafts.
        columns
            [N] int64; the group's rows are written: the draft id, or -1 where the logits are no distribution.
        """
        count = int(np.searchsorted(self.rows, num_active))
        if count == 0:
            return
        rows = slice(0, count) if self._device_rows is None else self._device_rows[:count]
        columns[rows] = self._draw(logits[rows], offset, count)

    def _draw(self, logits: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        if not self.mode.gumbel:
            largest, columns = logits.max(-1)
            return torch.where(largest.isnan(), -1, columns)
        if self.mode.sends_logits:
            logits = self._keep(logits, offset, count)
        return gumbel_sample(
            logits,
            self._temperatures[:count],
            self._keys[:count],
            self._positions[:count] + offset,
            draft_offset=0 if self.mode.coupled else offset,
            token_ids=self._draft_token_ids,
            use_fp64=self.mode.use_fp64,
        )

    def _keep(self, logits: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        """Stores what is sent of the logits; returns what is sampled from."""
        rows = slice(0, count) if self._device_rows is None else self._device_rows[:count]
        kept = self._buffers.logits(self.mode)
        if self.mode.dense:
            kept[rows, offset] = logits
            return logits
        largest, columns = logits.topk(self.mode.top_n, dim=-1)
        kept[rows, offset] = largest
        ids = columns if self._draft_token_ids is None else self._draft_token_ids[columns]
        self._buffers.token_ids(self.mode)[rows, offset] = ids.int()
        return torch.full_like(logits, -torch.inf).scatter_(-1, columns, largest)

    def sent_logits(self, batch_rows: np.ndarray, counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits float32 [D, n] and token ids int32 [D, n] (top_n alone) of the group's drafts, on the CPU.

        Parameters
        ----------
        batch_rows
            int64 [M], the group's rows in the order in which the drafts are wanted.
        counts
            int64 [M], drafts of each.
        """
        logits = self._buffers.logits(self.mode)
        rows = np.repeat(batch_rows, counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = torch.from_numpy(rows * logits.shape[1] + offsets).to(logits.device)
        token_ids = self._buffers.token_ids(self.mode).flatten(0, 1)[places].cpu() if self.mode.top_n else None
        return logits.flatten(0, 1)[places].cpu(), token_ids
