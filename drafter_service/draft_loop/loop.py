"""A draft step on the device: accepted rows enter the head's cache, and the head drafts."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from drafter_service.draft_loop import advance
from drafter_service.draft_loop.context import LoopContext, LoopMemory
from drafter_service.draft_loop.inputs import PackedInputs
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.sampling import DraftSampler
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.state import LoopState
from drafter_service.heads.spec import Head
from drafter_service.limits import EngineLimits
from draftwire.model.block_pool import blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE, KVCache


class LoopShape(NamedTuple):
    """Shape of a step's launches."""

    mode: SamplingMode
    num_sequences: int  # padding included
    num_rows: int  # padding included
    max_rows: int  # most rows of a sequence
    num_drafts: int  # most drafts of a sequence


class DraftLoop:
    """Runs draft steps. Inputs (`inputs`, `states`) and results (`drafts`, the logits buffers) have fixed addresses.

    Attributes:
        inputs: The step's sequences and rows; must not change before the step has ended.
        states: [rows, hidden], g of each accepted row, on the device.
        tables: [max_num_seqs, W] int32, blocks of the sequences by slot, as far as steps needed them, on the device.
        drafts: [max_num_seqs, k] int32, target ids of the last step's drafts, on the host after the step; -1 from the
            first draft on that is not wanted or had no distribution.
        confidences: [max_num_seqs, k] float32 of the same drafts, if the step's mode has confidences.
    """

    def __init__(
        self,
        head: Head,
        cache: KVCache,
        buffers: LogitsBuffers,
        limits: EngineLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._head = head
        count, k = limits.max_num_seqs, limits.max_num_speculative_tokens
        max_rows, max_blocks = count * (k + 1), blocks_for(limits.max_model_len)
        self._state = LoopState.allocate(count, max_rows, max_blocks, k, device)
        self._memory = LoopMemory(
            cache=cache,
            sampler=DraftSampler(count, head.draft_token_ids, buffers, device),
            draft_token_ids=head.draft_token_ids,
            row_ends=torch.arange(count + 1, dtype=torch.int32, device=device),
            max_length=max_blocks * BLOCK_SIZE,
        )
        self.inputs = PackedInputs(count, max_rows, head.spec.rows_of_step(k), device)
        self.states = torch.zeros(max_rows, head.spec.hidden_size, dtype=dtype, device=device)
        self.tables = torch.zeros(count, max_blocks, dtype=torch.int32, device=device)
        self._results = torch.zeros(count, k, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.drafts, self.confidences = self._results[..., 0], self._results.view(torch.float32)[..., 1]
        self._state_rows = lru_cache(maxsize=4096)(lambda begin, end: self.states[begin:end])

    def state_rows(self, begin: int, end: int) -> torch.Tensor:
        """Return rows of `states`. Views are cached, because creating one takes long."""
        return self._state_rows(begin, end)

    def drafts_on_device(self, num_sequences: int, num_drafts: int, *, confidences: bool) -> torch.Tensor:
        """Return the drafts of the step that was launched last, [S, num_drafts] int32; with `confidences`
        [S, num_drafts, 2], each draft and the bits of its confidence."""
        results = self._state.results[:num_sequences, :num_drafts]
        return results if confidences else results[..., 0]

    def keep_blocks(self, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        """Record the blocks int32 [n, >= W] of sequences int64 [n] whose rows were computed outside of the loop."""
        self.tables[slots] = blocks[:, : self.tables.shape[1]]

    def run(self, shape: LoopShape) -> None:
        """Launch the step that `inputs` and `states` describe, without waiting for the device."""
        self.inputs.send(shape.num_sequences, shape.num_rows)
        inputs = self.inputs.device(shape.num_sequences, shape.num_rows)
        state = self._state.view(shape.num_sequences, shape.num_rows)
        advance.begin(inputs, self.tables, state)
        states = self.states[: shape.num_rows]
        context = LoopContext(self._memory, shape.mode, inputs, state, states, shape.max_rows)
        self._head.draft(context, shape.num_drafts)
        self._results[: shape.num_sequences].copy_(state.results, non_blocking=True)
