"""Block verification with draft logits: the drafts of a step are decided together (Sun et al. 2403.10444).

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), i drafts pass if u_i < h_i; h_i is s_i / (s_i + 1 - w_i), s_i
the mass of max(w_i p - q, 0) in the row after them, and h = w after the last usable draft. The longest passing prefix
is accepted.

The first launch (`verify_kernel`) sums the masses of p and q, without noise, which determines the weights. Because
h_i <= w_i, with equality for w_i = 1, prefixes with u_i >= w_i fail, and prefixes shorter than one that certainly
passes are not needed. The second launch reads the remaining rows, 1.8 of 6 on average in the benchmark, the longest
prefix first: each is a wave, which is skipped if a longer prefix has been accepted. It sums s_i and bounds the mass of
each group in one pass.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import (
    announce,
    at,
    close_wave,
    highest_bit,
    is_decided_before,
    is_last,
    load_drafts,
    request_rows,
)
from draftwire_kernels.gpu.draw import (
    draw_residual,
    draw_residual_of_list,
    load_piece,
    piece_residual,
    residual_bounds,
    token_masses,
)
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.race import compute_type
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, scan_residual, store_groups


@triton.jit
def begin_block(batch, scratch, request, rows, USE_FP64: tl.constexpr, ROWS: tl.constexpr):
    """Store the weights of all prefixes, and which prefixes may be accepted; the shortest of these certainly passes."""
    block = scratch.block
    first_row, _, num_drafts = request_rows(batch, request)
    usable = (rows.ended == 0) & (rows.top > -INFINITY)
    num_usable = tl.minimum(tl.min(tl.where(rows.drafted & (usable == 0), rows.offset, NO_INDEX), 0), num_drafts)
    ratio = tl.where(rows.offset < num_usable, rows.p / rows.q, 0.0)
    weight = compute_type(tl.full([], 1.0, tl.float32), USE_FP64)
    after = ratio  # weight after the draft of each row
    last_weight = weight
    tl.store(block.weight + first_row, weight)
    for i in range(ROWS):
        weight = tl.minimum(weight * at(ratio, rows.offset, i), 1.0)
        after = tl.where(rows.offset == i, weight, after)
        last_weight = tl.where(i == num_usable - 1, weight, last_weight)
    row = first_row + rows.offset
    tl.store(block.weight + row + 1, after, mask=rows.drafted)
    # Sampling from p, after all drafts and if the drafts end early, needs no weight.
    all_pass = (num_usable == 0) | (at(rows.uniform, rows.offset, num_usable - 1) < last_weight)
    may_pass = (rows.offset + 1 < num_usable) & (rows.uniform < after)
    surely = tl.maximum(tl.max(tl.where(may_pass & (after >= 1.0), rows.offset, -1), 0) + 1, 0)
    bits = tl.sum(tl.where(may_pass & (rows.offset >= surely), 2 << rows.offset, 0), 0) | (1 << surely)
    tl.store(block.prefixes + request, tl.where(all_pass, 1 << num_usable, bits))
    draws_from_p = (rows.drafted == 0) | (rows.offset >= num_usable)
    tl.store(block.statistics + row * 4, rows.top, mask=rows.exists)
    tl.store(block.statistics + row * 4 + 1, rows.mass, mask=rows.exists)
    tl.store(block.statistics + row * 4 + 2, tl.where(draws_from_p, 0.0, rows.draft_top), mask=rows.exists)
    tl.store(block.statistics + row * 4 + 3, tl.where(draws_from_p, INFINITY, rows.draft_mass), mask=rows.exists)


@triton.jit
def listed_mass(
    logits,
    draft,
    draft_row,
    num_columns,
    temperature,
    top,
    p_share,
    draft_top,
    q_share,
    weight,
    USE_FP64: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Return the mass of max(weight p - q, 0) for q on a list of ids; reads only the listed logits."""
    kept = compute_type(tl.full([], 0.0, tl.float32), USE_FP64)
    for turn in range(LISTS):
        piece = load_piece(logits, draft, draft_row, draft.width, num_columns, turn, LIST)
        p = token_masses(piece[1], top, temperature, p_share, USE_FP64)
        weight -= tl.sum(tl.where(piece[0] >= 0, p, 0.0), 0)
        kept += tl.sum(piece_residual(piece, temperature, top, p_share, draft_top, q_share, USE_FP64), 0)
    return kept + tl.maximum(weight, 0.0)


@triton.jit
def test_prefix(
    batch,
    draft,
    scratch,
    request,
    wave,
    prefix,
    is_sure,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,
    weight,
    num_groups,
    num_parts,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    PARTS: tl.constexpr,
    WAVES: tl.constexpr,
):
    """Return whether a prefix whose row has been read passes, and the next token, -1 if no mass is left."""
    block = scratch.block
    first_row, first_draft, _ = request_rows(batch, request)
    row = first_row + prefix
    draft_row = first_draft + prefix
    logits = batch.logits + row * batch.logits_stride
    has_residual = draft_mass < INFINITY
    p_share, q_share = weight / mass, 1.0 / draft_mass
    place = tl.arange(0, PARTS)
    parts = block.part_mass + row * num_parts + place
    left = tl.sum(tl.load(parts, mask=place < num_parts, other=0.0, cache_modifier=".cg"), 0)
    if LISTS > 0:  # noqa: SIM102
        if has_residual:
            left = listed_mass(
                logits, draft, draft_row, batch.vocab, temperature, top, p_share, draft_top, q_share, weight, USE_FP64,
                LIST, LISTS,
            )  # fmt: skip
    total = left + 1.0 - weight
    threshold = tl.where(total > 0, left / tl.where(total > 0, total, 1.0), 0.0)
    position = tl.load(batch.position + request) + prefix
    uniform = accept_uniform(tl.load(batch.accept + request), position - 1, prefix - 1, USE_FP64)
    passes = is_sure | (uniform < threshold)
    if WAVES > 1:  # otherwise no program reads or resets the word
        announce(scratch.waves, request, wave, passes)
    token = tl.full([], -1, tl.int32)
    score = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    if passes:
        state = row_state(tl.load(batch.resample + request), position, prefix * 0)
        group = tl.arange(0, GROUPS)
        group_mass = block.group_mass + row * num_groups + group
        bound = residual_bounds(tl.load(group_mass, mask=group < num_groups, other=0.0, cache_modifier=".cg"), state)
        if LISTS > 0:
            score, token = draw_residual_of_list(
                logits, draft, draft_row, None, batch.vocab, temperature, top, p_share, draft_top, q_share, state,
                bound, USE_FP64, GROUP, LIST, LISTS,
            )  # fmt: skip
        else:
            score, token = draw_residual(
                logits, batch.vocab, draft.logits + draft_row * draft.logits_stride, draft.column_of, temperature, top,
                p_share, draft_top, q_share, state, bound, USE_FP64, GROUP, 1,
            )  # fmt: skip
    return passes, tl.where(score > -INFINITY, token, -1)


@triton.jit(do_not_specialize=["num_requests"])
def block_kernel(
    batch,
    draft,
    scratch,
    out,
    num_requests,
    num_groups,  # groups of a row in this launch
    num_splits,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WAVES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Read the row after each prefix that may be accepted, longest first; sample from that of the accepted prefix."""
    block = scratch.block
    split = tl.program_id(0) % num_splits
    request = (tl.program_id(0) // num_splits) % num_requests
    wave = tl.program_id(0) // (num_splits * num_requests)
    prefixes = tl.load(block.prefixes + request)
    num_waves = tl.sum((prefixes >> tl.arange(0, 32)) & 1, 0)
    if wave >= num_waves:
        return
    for _ in range(wave):
        prefixes -= 1 << highest_bit(prefixes)
    prefix = highest_bit(prefixes)
    is_sure = wave == num_waves - 1
    first_row, first_draft, _ = request_rows(batch, request)
    temperature = tl.load(batch.temperature + request)

    row = first_row + prefix
    top = tl.load(block.statistics + row * 4).to(tl.float32)
    mass = tl.load(block.statistics + row * 4 + 1)
    draft_top = tl.load(block.statistics + row * 4 + 2).to(tl.float32)
    draft_mass = tl.load(block.statistics + row * 4 + 3)
    weight = tl.load(block.weight + row)
    # Usually one iteration. If the residual has no mass, the closing program reads the row again and samples from p.
    step = split * 0 + num_splits
    token = tl.full([], -1, tl.int32)
    is_closing = prefix < 0
    passes = prefix < 0
    is_plain = prefix < 0
    is_open = prefix >= 0
    while is_open:
        draft_top = tl.where(is_plain, 0.0, draft_top)
        draft_mass = tl.where(is_plain, INFINITY, draft_mass)
        has_residual = draft_mass < INFINITY
        if has_residual == 0:
            weight = weight * 0 + 1.0
        if (top > -INFINITY) & (is_decided_before(scratch.waves, request, wave) == 0):
            draft_logits = None if LISTS > 0 else draft.logits + (first_draft + prefix) * draft.logits_stride
            part = scan_residual(
                batch.logits + row * batch.logits_stride, draft_logits, draft.column_of, batch.vocab, temperature, top,
                (weight / mass).to(tl.float32), draft_top, (1.0 / draft_mass).to(tl.float32), split, step,
                block.group_mass + row * num_groups, USE_FP64, TILE, GROUP, LINE,
            )  # fmt: skip
            count = tl.where(is_plain, 0, TILE)
            store_groups(block.part_mass + (row * num_splits + split) * TILE, tl.arange(0, TILE), count, part)
        is_open = prefix < 0
        if is_closing:
            tl.debug_barrier()
        else:
            is_closing = is_last(scratch.waves.arrived + wave * num_requests + request, num_splits)
        if is_closing:
            is_needless = is_decided_before(scratch.waves, request, wave)
            is_valid = (top > -INFINITY) & (is_needless == 0)
            passes = is_needless == 0
            if is_valid:
                passes, token = test_prefix(
                    batch, draft, scratch, request, wave, prefix, is_sure | is_plain, temperature, top, mass, draft_top,
                    draft_mass, weight, num_groups, num_splits * TILE, USE_FP64, GROUP, GROUPS, LIST, LISTS,
                    SPLITS * TILE, WAVES,
                )  # fmt: skip
                is_open = passes & (token < 0) & has_residual
                is_plain = is_open
                split = tl.where(is_open, 0, split)
                step = tl.where(is_open, 1, step)
    if is_closing:
        drafts = load_drafts(batch, request, WIDTH)
        close_wave(scratch.waves, out, request, drafts, wave, num_waves, prefix, token, passes, WAVES, WIDTH)
