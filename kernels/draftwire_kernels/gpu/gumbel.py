"""Gumbel-max sampling in one launch; the last program of a row evaluates the groups that can still win."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import is_last
from draftwire_kernels.gpu.noise import row_state
from draftwire_kernels.gpu.race import load_groups, race_bounds, race_of_target
from draftwire_kernels.gpu.scan import INFINITY, load_tile, lowest_argmax, maximum_or_nan, scan_sampled, scan_tops


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
    group_lead,  # [N, G] float32
    num_groups,
    arrived,  # [N] int32, zero before and after
    tokens,  # [N] int64
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    logits += row * logits_stride
    x = load_tile(logits, split, vocab, TILE, GROUP, LINE)  # first, because this load takes longest
    temperature = tl.load(temperature_ptr + row)
    offset = same_offset if draft_offset is None else tl.load(draft_offset + row)
    row_key, row_position = tl.load(key + row), tl.load(position + row)
    group_top += row * num_groups
    group_lead += row * num_groups
    if temperature > 0:
        scan_sampled(
            x, logits, token_ids, vocab, temperature, row_key, row_position, offset, split, group_top, group_lead,
            TILE, GROUP, LINE, SPLITS,
        )  # fmt: skip
    else:
        scan_tops(x, logits, vocab, split, group_top, TILE, GROUP, LINE, SPLITS)
    if is_last(arrived + row, SPLITS):
        largest, lead = load_groups(group_top, group_lead, num_groups, GROUPS)
        top = maximum_or_nan(largest, 0)
        winner = tl.full([], -1, tl.int32)
        if top > -INFINITY:
            if temperature > 0:
                bound = race_bounds(largest, lead, top, temperature)
                state = row_state(row_key, row_position, offset)
                winner = race_of_target(logits, token_ids, vocab, temperature, top, state, bound, USE_FP64, GROUP)
            else:
                winner = lowest_argmax(logits, largest, top, vocab, GROUP)
        tl.store(tokens + row, winner.to(tl.int64))
