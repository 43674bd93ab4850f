"""Kernels between the passes of a draft step, one launch each; `drafter_service.draft_loop.advance` documents them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from drafter_service.draft_loop.inputs import LoopInputs
from drafter_service.draft_loop.state import BlockState, LoopState
from draftwire.model.kv_cache import BLOCK_SIZE as _BLOCK_SIZE
from draftwire_kernels.gpu import counters
from draftwire_kernels.gpu.batch import is_last

BLOCK_SIZE = tl.constexpr(_BLOCK_SIZE)
_TABLE_BLOCK = 256
_RECORD_BLOCK = 64
# Programs per row of logits, and logits per read: with 150,000 logits each program reads ten times.
_SPLITS, _LOGITS_BLOCK = 16, 1024


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "tables_width", "given_width"])
def _begin_kernel(
    inputs,
    state,
    tables,
    tables_width,
    given_width,  # of state.block_tables' rows
    num_sequences,
    num_rows,
    NEW_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """Begin a step. Grid: one program a sequence, and one more for rows of padding."""
    sequence = tl.program_id(0)
    first_row = tl.load(inputs.cu_rows + sequence)
    if sequence == num_sequences:
        while first_row < num_rows:
            row = first_row + tl.arange(0, ROWS)
            inside = row < num_rows
            zero = tl.zeros([ROWS], tl.int64)
            tl.store(state.tokens + row, zero, mask=inside)
            tl.store(state.positions + row, zero, mask=inside)
            tl.store(state.slot_mapping + row, zero + row % BLOCK_SIZE, mask=inside)
            first_row += ROWS
    else:
        count = tl.load(inputs.cu_rows + sequence + 1) - first_row
        first_place = tl.load(inputs.first_places + sequence)
        first_position = tl.load(inputs.first_positions + sequence)
        slot = tl.load(inputs.slots + sequence).to(tl.int64)
        new_blocks = inputs.new_blocks + sequence * NEW_BLOCKS
        offset = tl.arange(0, ROWS)
        inside = offset < count
        row = first_row + offset
        token = tl.load(inputs.tokens + row, mask=inside, other=0)
        place = first_place + offset
        block = tl.load(new_blocks + (place // BLOCK_SIZE - first_place // BLOCK_SIZE), mask=inside, other=0)
        tl.store(state.tokens + row, token.to(tl.int64), mask=inside)
        tl.store(state.positions + row, (first_position + offset).to(tl.int64), mask=inside)
        tl.store(state.slot_mapping + row, block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE, mask=inside)
        tl.store(state.lengths + sequence, tl.where(count > 0, first_place + count, 0))
        tl.store(state.last_rows + sequence, tl.maximum(first_row + count - 1, 0).to(tl.int64))
        tl.store(state.draw_positions + sequence, (first_position + count + 1).to(tl.int64))

        # Blocks of earlier steps, and new blocks, which are also stored in the tables for later steps.
        first_block = first_place // BLOCK_SIZE
        end = tl.where(slot >= 0, tl.minimum(first_block + NEW_BLOCKS, tables_width), 1)
        first_column = end * 0
        while first_column < end:
            column = first_column + tl.arange(0, TABLE_BLOCK)
            is_new = (column >= first_block) & (column < end) & (slot >= 0)
            is_known = (column < first_block) & (slot >= 0)
            new = tl.load(new_blocks + (column - first_block), mask=is_new, other=0)
            known = tl.load(tables + slot * tables_width + column, mask=is_known, other=0)
            given = state.block_tables + sequence.to(tl.int64) * given_width + column
            tl.store(given, tl.where(is_new, new, known), mask=column < end)
            tl.store(tables + slot * tables_width + column, new, mask=is_new & (new > 0))
            first_column += TABLE_BLOCK


@triton.jit(do_not_specialize=["num_sequences"])
def _begin_block_kernel(
    inputs,
    state,
    block,
    num_sequences,
    NUM_ROWS: tl.constexpr,
    NEW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Begin a block step. Grid: one program for BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence, offset = row // NUM_ROWS, row % NUM_ROWS
    inside = sequence < num_sequences
    wanted = tl.load(inputs.num_drafts + sequence, mask=inside, other=0)
    length = tl.load(state.lengths + sequence, mask=inside, other=0)
    first_place = tl.load(inputs.first_places + sequence, mask=inside, other=0)
    first_position = tl.load(inputs.first_positions + sequence, mask=inside, other=0)
    has_room = wanted > 0
    place = length + offset
    index = place // BLOCK_SIZE - first_place // BLOCK_SIZE
    new_block = tl.load(inputs.new_blocks + sequence * NEW_BLOCKS + index, mask=inside & has_room, other=0)
    slot = tl.where(has_room, new_block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE, row % BLOCK_SIZE)
    position = tl.where(has_room, first_position + place - first_place, 0)
    tl.store(block.tokens + row, tl.zeros([BLOCK], tl.int64), mask=inside)
    tl.store(block.positions + row, position.to(tl.int64), mask=inside)
    tl.store(block.slots + row, slot, mask=inside)
    tl.store(block.lengths + sequence, tl.where(wanted > 0, length, 0) + NUM_ROWS, mask=inside & (offset == 0))


@triton.jit(do_not_specialize=["num_sequences", "offset", "results_width"])
def _record_kernel(
    columns,  # [N] int64
    offset,
    inputs,
    state,
    results_width,  # int32 of a sequence in state.results
    draft_token_ids,  # [V_draft] int64, or None
    confidences,  # [N] float32, or None
    num_sequences,
    NEW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Record drafts. Grid: one program for BLOCK sequences."""
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < num_sequences
    column = tl.load(columns + sequence, mask=inside, other=0)
    token = tl.maximum(column, 0)
    if draft_token_ids is not None:
        token = tl.load(draft_token_ids + token, mask=inside, other=0)
    num_drafts = tl.load(inputs.num_drafts + sequence, mask=inside, other=0)
    drafts = state.results + sequence * results_width + 2 * offset
    before = tl.load(drafts - 2, mask=inside & (offset > 0), other=0)
    is_draft = (column >= 0) & (offset < num_drafts) & (before >= 0)
    tl.store(drafts, tl.where(is_draft, token, -1).to(tl.int32), mask=inside)
    if confidences is not None:
        confidence = tl.load(confidences + sequence, mask=inside, other=0)
        tl.store(drafts + 1, confidence.to(tl.int32, bitcast=True), mask=inside)
    tl.store(state.next_tokens + sequence, token, mask=inside)
    first_place = tl.load(inputs.first_places + sequence, mask=inside, other=0)
    first_position = tl.load(inputs.first_positions + sequence, mask=inside, other=0)
    place = tl.load(state.lengths + sequence, mask=inside, other=0) + offset
    is_wanted = inside & (offset + 1 < num_drafts)
    index = place // BLOCK_SIZE - first_place // BLOCK_SIZE
    block = tl.load(inputs.new_blocks + sequence * NEW_BLOCKS + index, mask=is_wanted, other=0)
    # Sequences that want no more drafts compute padding: they write to block 0, and their results are unused.
    slot = tl.where(is_wanted, block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE, sequence % BLOCK_SIZE)
    position = tl.where(is_wanted, first_position + place - first_place, 0)
    tl.store(state.next_slots + sequence, slot, mask=inside)
    tl.store(state.next_lengths + sequence, tl.where(is_wanted, place + 1, 1), mask=inside)
    tl.store(state.next_positions + sequence, position.to(tl.int64), mask=inside)
    drawn = tl.load(state.draw_positions + sequence, mask=inside, other=0)
    tl.store(state.draw_positions + sequence, drawn + 1, mask=inside)


@triton.jit
def _max_probability_kernel(
    logits,  # [N, V]
    logits_stride,
    vocab,
    tops,  # [N, SPLITS] float32
    sums,  # [N, SPLITS] float32
    arrived,  # [N] int32, zero before and after
    highest,  # [N] float32
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: SPLITS programs a row, each over every SPLITS-th block of logits; the last to arrive combines the sums."""
    split = tl.program_id(0) % SPLITS
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = split * BLOCK
    while first < vocab:
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * logits_stride + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        above = tl.maximum(top, x)
        # exp(-inf - -inf) is NaN; such a column has no mass yet.
        total = tl.where(above == -float("inf"), 0.0, total * tl.exp(top - above) + tl.exp(x - above))
        top = above
        first += SPLITS * BLOCK
    part = tl.max(top, 0)
    mass = tl.sum(tl.where(top == -float("inf"), 0.0, total * tl.exp(top - part)), 0)
    tl.store(tops + row * SPLITS + split, part)
    tl.store(sums + row * SPLITS + split, mass)
    if is_last(arrived + row, SPLITS):
        every = row * SPLITS + tl.arange(0, SPLITS)
        parts, masses = tl.load(tops + every, cache_modifier=".cg"), tl.load(sums + every, cache_modifier=".cg")
        most = tl.max(parts, 0)
        whole = tl.sum(tl.where(parts == -float("inf"), 0.0, masses * tl.exp(parts - most)), 0)
        # With invalid logits, such as NaN and inf, the sum is below 1 or NaN.
        tl.store(highest + row, tl.where(whole >= 1.0, 1.0 / whole, 0.0))


def max_probability(logits: Tensor) -> Tensor:
    num_rows, vocab = logits.shape
    tops, sums = logits.new_empty(2, num_rows, _SPLITS, dtype=float32)
    highest = logits.new_empty(num_rows, dtype=float32)
    _max_probability_kernel[(num_rows * _SPLITS,)](
        logits,
        logits.stride(0),
        vocab,
        tops,
        sums,
        counters.zeros(num_rows, logits.device),
        highest,
        SPLITS=_SPLITS,
        BLOCK=_LOGITS_BLOCK,
        num_warps=4,
    )
    return highest


def begin(inputs: LoopInputs, tables: Tensor, state: LoopState) -> None:
    num_sequences, num_new_blocks = inputs.new_blocks.shape
    num_rows = inputs.tokens.shape[0]
    _begin_kernel[(num_sequences + 1,)](
        inputs,
        state,
        tables,
        tables.shape[1],
        state.block_tables.stride(0),
        num_sequences,
        num_rows,
        NEW_BLOCKS=num_new_blocks,
        ROWS=triton.next_power_of_2(num_new_blocks * _BLOCK_SIZE),  # the new blocks hold a sequence's rows
        TABLE_BLOCK=_TABLE_BLOCK,
        num_warps=4,
    )


def begin_block(inputs: LoopInputs, state: LoopState, block: BlockState, num_rows: int) -> None:
    num_sequences, num_new_blocks = inputs.new_blocks.shape
    _begin_block_kernel[(triton.cdiv(num_sequences * num_rows, _RECORD_BLOCK),)](
        inputs,
        state,
        block,
        num_sequences,
        NUM_ROWS=num_rows,
        NEW_BLOCKS=num_new_blocks,
        BLOCK=_RECORD_BLOCK,
        num_warps=2,
    )


def record(
    columns: Tensor,
    offset: int,
    inputs: LoopInputs,
    state: LoopState,
    draft_token_ids: Tensor | None,
    confidences: Tensor | None = None,
) -> None:
    num_sequences, num_new_blocks = inputs.new_blocks.shape
    _record_kernel[(triton.cdiv(num_sequences, _RECORD_BLOCK),)](
        columns,
        offset,
        inputs,
        state,
        state.results.stride(0),
        draft_token_ids,
        confidences,
        num_sequences,
        NEW_BLOCKS=num_new_blocks,
        BLOCK=_RECORD_BLOCK,
        num_warps=2,
    )
