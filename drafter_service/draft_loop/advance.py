"""The device's work of a draft step before, between and after the head's passes.

On CPUs it is torch code; on CUDA it is one Triton kernel before the first pass and one after each draft.
"""

from __future__ import annotations

import torch

from drafter_service.draft_loop.inputs import LoopInputs
from drafter_service.draft_loop.state import BlockState, LoopState
from drafter_service.heads.operations import uses_triton
from draftwire.model.kv_cache import BLOCK_SIZE


def begin(inputs: LoopInputs, tables: torch.Tensor, state: LoopState) -> None:
    """Set the state for the pass over the accepted rows.

    Args:
        tables: [slots, W] int32, the blocks of all sequences, as far as earlier steps needed them; the step's new
            blocks are added.
        state: Output: all of `lengths`, `last_rows`, `draw_positions` and the fields of rows, and `block_tables` as far
            as the step needs them. Rows of padding get token and position 0 and a slot of block 0.
    """
    if uses_triton(tables):
        from drafter_service.draft_loop import kernels

        kernels.begin(inputs, tables, state)
        return
    num_sequences, num_rows = len(inputs.slots), len(inputs.tokens)
    cu_rows = inputs.cu_rows.long()
    counts = cu_rows.diff()
    row = torch.arange(num_rows, device=tables.device)
    owner = torch.searchsorted(cu_rows[1:], row, right=True)
    is_row = owner < num_sequences
    owner = owner.clamp_max(num_sequences - 1)
    offset = row - cu_rows[owner]
    slots = _slots_of(inputs.first_places[owner] + offset, owner, inputs)
    state.tokens[:] = torch.where(is_row, inputs.tokens, 0)
    state.positions[:] = torch.where(is_row, inputs.first_positions[owner] + offset, 0)
    state.slot_mapping[:] = torch.where(is_row, slots, row % BLOCK_SIZE)
    state.lengths[:] = torch.where(counts > 0, inputs.first_places + counts, 0)
    state.last_rows[:] = (cu_rows[1:] - 1).clamp_min(0)
    state.draw_positions[:] = inputs.first_positions + counts + 1

    columns = inputs.first_places[:, None] // BLOCK_SIZE + torch.arange(
        inputs.new_blocks.shape[1], device=tables.device
    )
    is_new = (inputs.slots[:, None] >= 0) & (inputs.new_blocks > 0)
    known = inputs.slots.long()[:, None].expand_as(columns)
    tables[known[is_new], columns[is_new].long()] = inputs.new_blocks[is_new]
    state.block_tables[:] = torch.where(inputs.slots[:, None] >= 0, tables[inputs.slots.clamp_min(0).long()], 0)


def begin_block(inputs: LoopInputs, state: LoopState, num_rows: int) -> BlockState:
    """Return `num_rows` rows of each sequence after its accepted rows.

    Args:
        state: As set by `begin`. A sequence that wants drafts has room for the rows. Rows of other sequences are
            padding in block 0, which is never read.
    """
    columns = torch.empty(3, len(inputs.slots) * num_rows, dtype=torch.int64, device=state.lengths.device)
    block = BlockState(columns[0], columns[1], columns[2], torch.empty_like(state.lengths))
    if uses_triton(state.lengths):
        from drafter_service.draft_loop import kernels

        kernels.begin_block(inputs, state, block, num_rows)
        return block
    sequence = torch.arange(len(inputs.slots), device=state.lengths.device)[:, None]
    offset = torch.arange(num_rows, device=state.lengths.device)
    has_room = inputs.num_drafts[:, None] > 0
    place = state.lengths[:, None] + offset
    position = inputs.first_positions[:, None] + place - inputs.first_places[:, None]
    slots = _slots_of(place, sequence.expand_as(place), inputs)
    row = sequence * num_rows + offset
    block.tokens.zero_()
    block.positions[:] = torch.where(has_room, position, 0).flatten()
    block.slots[:] = torch.where(has_room, slots, row % BLOCK_SIZE).flatten()
    block.lengths[:] = torch.where(inputs.num_drafts > 0, state.lengths, 0) + num_rows
    return block


def record(
    columns: torch.Tensor,
    offset: int,
    inputs: LoopInputs,
    state: LoopState,
    draft_token_ids: torch.Tensor | None,
    confidences: torch.Tensor | None = None,
) -> None:
    """Record drafts, and set the state for the pass over their rows.

    Args:
        columns: [N] int64, the drawn ids of the draft vocabulary, or -1.
        offset: Offset of these drafts in the step.
        draft_token_ids: [V_draft] int64, target ids; None if both vocabularies are the same.
        confidences: [N] float32 of these drafts, if wanted.
    """
    if uses_triton(columns):
        from drafter_service.draft_loop import kernels

        kernels.record(columns, offset, inputs, state, draft_token_ids, confidences)
        return
    tokens = columns.clamp_min(0)
    if draft_token_ids is not None:
        tokens = draft_token_ids[tokens]
    is_draft = (columns >= 0) & (offset < inputs.num_drafts)
    if offset > 0:
        is_draft &= state.drafts[:, offset - 1] >= 0
    state.drafts[:, offset] = torch.where(is_draft, tokens, -1)
    if confidences is not None:
        state.confidences[:, offset] = confidences
    state.next_tokens[:] = tokens
    sequence = torch.arange(len(columns), device=columns.device)
    place = state.lengths + offset
    # Sequences that want no more drafts compute padding: they write to block 0, and their results are unused.
    is_wanted = offset + 1 < inputs.num_drafts
    state.next_slots[:] = torch.where(is_wanted, _slots_of(place, sequence, inputs), sequence % BLOCK_SIZE)
    state.next_lengths[:] = torch.where(is_wanted, place + 1, 1)
    state.next_positions[:] = torch.where(is_wanted, inputs.first_positions + place - inputs.first_places, 0)
    state.draw_positions.add_(1)


def _slots_of(places: torch.Tensor, owner: torch.Tensor, inputs: LoopInputs) -> torch.Tensor:
    """Return the cache slots (int64) of places in sequences `owner`; undefined for places without a block."""
    index = places // BLOCK_SIZE - inputs.first_places[owner] // BLOCK_SIZE
    last = inputs.new_blocks.shape[1] - 1
    return inputs.new_blocks[owner, index.clamp(0, last).long()].long() * BLOCK_SIZE + places % BLOCK_SIZE
