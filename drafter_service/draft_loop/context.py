"""The context of one draft step, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from drafter_service.draft_loop import advance
from drafter_service.draft_loop.confidence import max_probability
from drafter_service.draft_loop.inputs import LoopInputs
from drafter_service.draft_loop.sampling import DraftSampler
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.state import LoopState
from drafter_service.heads.spec import DraftContext, Rows
from draftwire.model.kv_cache import KVCache, RaggedBatch


class LoopMemory(NamedTuple):
    """Objects that all steps of a loop share."""

    cache: KVCache
    sampler: DraftSampler
    draft_token_ids: torch.Tensor | None  # of the head
    row_ends: torch.Tensor  # [max_num_seqs + 1] int32, 0, 1, 2, ...
    max_length: int  # most rows of a sequence


class LoopContext(DraftContext):
    """The context of a step whose inputs and state lie at fixed addresses, so that a step can be captured."""

    def __init__(
        self,
        memory: LoopMemory,
        mode: SamplingMode,
        inputs: LoopInputs,
        state: LoopState,
        states: torch.Tensor,
        max_rows: int,
    ) -> None:
        """`state` was set by `state.begin`; `states` and `max_rows` are those of the accepted rows."""
        self._memory, self._mode, self._inputs, self._state = memory, mode, inputs, state
        self.cache = memory.cache
        self.states = states
        self.wants_confidences = mode.confidences
        self.last_rows = state.last_rows
        batch = self._batch(state.slot_mapping, inputs.cu_rows, state.lengths, max_rows)
        self.rows = Rows(state.tokens, state.positions, batch)

    def draw(self, offset: int, logits: torch.Tensor, confidences: torch.Tensor | None = None) -> torch.Tensor:
        if self.wants_confidences and confidences is None:
            confidences = max_probability(logits)
        columns = self._memory.sampler.draw(logits, self._mode, offset, self._inputs, self._state)
        advance.record(columns, offset, self._inputs, self._state, self._memory.draft_token_ids, confidences)
        return self._state.next_tokens

    def next_rows(self) -> Rows:
        state = self._state
        ends = self._memory.row_ends[: len(state.next_lengths) + 1]
        batch = self._batch(state.next_slots, ends, state.next_lengths, 1)
        return Rows(state.next_tokens, state.next_positions, batch)

    def block(self, num_rows: int) -> Rows:
        block = advance.begin_block(self._inputs, self._state, num_rows)
        ends = self._memory.row_ends[: len(block.lengths) + 1] * num_rows
        batch = self._batch(block.slots, ends, block.lengths, num_rows)
        return Rows(block.tokens, block.positions, batch)

    def _batch(self, slots: torch.Tensor, ends: torch.Tensor, lengths: torch.Tensor, max_rows: int) -> RaggedBatch:
        return RaggedBatch.from_tensors(
            slots, ends, lengths, self._state.block_tables, max_rows=max_rows, max_length=self._memory.max_length
        )
