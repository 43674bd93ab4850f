"""Gumbel-max sampling: one launch; the last program of a row looks at the groups that can still win."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import is_last
from draftwire_kernels.gpu.noise import row_state
from draftwire_kernels.gpu.race import lane_bounds, load_groups, race_of_target
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, maximum_or_nan, scan_greedy, scan_sampled


@triton.jit(do_not_specialize=["same_offset"])
def gumbel_kernel(
    logits,  # [N, V]
    logits_stride,
    vocab,
    temperature_ptr,  # [N] float32
    key,  # [N] int64
    position,  # [N] int64
    draft_offset,  # [N] int32, or None: the same for all rows
    same_offset,
    token_ids,  # [V] int64, or None
    group_top,  # [N, G] float32
    lane_floor,  # [N, G] float32
    num_groups,
    part_top,  # [N, S] float32
    part_index,  # [N, S] int32
    num_splits,
    arrived,  # [N] int32, zero before and after
    tokens,  # [N] int64
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    TURNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0) % num_splits
    row = (tl.program_id(0) // num_splits).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    offset = same_offset if draft_offset is None else tl.load(draft_offset + row)
    state = row_state(tl.load(key + row), tl.load(position + row), offset)
    logits += row * logits_stride
    part = row * num_splits + split
    group = row * num_groups
    if temperature > 0:
        top, _ = scan_sampled(
            logits, token_ids, vocab, temperature, state, split, num_splits, group_top + group, lane_floor + group,
            True, False, False, TILE, GROUP, LINE, 1, TURNS,
        )  # fmt: skip
        tl.store(part_top + part, top)
    else:
        top, index = scan_greedy(logits, vocab, split, num_splits, TILE, GROUP, LINE, TURNS)
        tl.store(part_top + part, top)
        tl.store(part_index + part, index)
    if is_last(arrived + row, num_splits):
        splits = tl.arange(0, SPLITS)
        parts = row * num_splits + splits
        tops = tl.load(part_top + parts, mask=splits < num_splits, other=-INFINITY, cache_modifier=".cg")
        largest, floor = load_groups(group_top + group, lane_floor + group, num_groups, GROUPS, 1)
        top = maximum_or_nan(tops, 0)
        winner = tl.full([], -1, tl.int32)
        if top > -INFINITY:
            if temperature > 0:
                bound = lane_bounds(largest, floor, top, temperature)
                _, winner = race_of_target(
                    logits, token_ids, vocab, temperature, top, state, -1, bound, USE_FP64, GROUP, LINE, 1
                )
            else:
                index = tl.load(part_index + parts, mask=splits < num_splits, other=0, cache_modifier=".cg")
                winner = tl.min(tl.where(tops == top, index, NO_INDEX), 0)
        tl.store(tokens + row, winner.to(tl.int64))
