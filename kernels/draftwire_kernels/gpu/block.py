"""Block verification with draft logits: the drafts of a step are decided together (Sun et al. 2403.10444).

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), i drafts pass when u_i < h_i; h_i is s_i / (s_i + 1 - w_i), s_i
the mass of max(w_i p - q, 0) in the row after them, and h = w after the last usable draft. The longest passing prefix
is accepted. Since h_i <= w_i, the mass of a row is summed only when u_i < w_i, and not at all when the longest passes.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at, is_last, request_rows
from draftwire_kernels.gpu.race import compute_type, load_dense_draft, probability
from draftwire_kernels.gpu.resolve import load_rows, resolve
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, exponents, group_sum, load_logits, tile_columns


@triton.jit
def begin_block(
    batch,
    draft,
    scratch,
    out,
    request,
    temperature,
    rows,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Weights of all prefixes, the test of the longest, and the list of those that `block_kernel` has to test."""
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
    passes = (num_usable == 0) | (at(rows.uniform, rows.offset, num_usable - 1) < last_weight)
    may_pass = (rows.offset + 1 < num_usable) & (rows.uniform < after) & (passes == 0)
    num_candidates = tl.sum(may_pass.to(tl.int32), 0)
    longer = (rows.offset[None, :] > rows.offset[:, None]) & may_pass[None, :]
    place = tl.sum(longer.to(tl.int32), 1)
    tl.store(block.candidates + first_row + place, rows.offset + 1, mask=may_pass)
    tl.store(block.num_candidates + request, num_candidates)
    tl.store(block.statistics + row * 4, rows.top, mask=rows.exists)
    tl.store(block.statistics + row * 4 + 1, rows.mass, mask=rows.exists)
    tl.store(block.statistics + row * 4 + 2, rows.draft_top, mask=rows.drafted)
    tl.store(block.statistics + row * 4 + 3, rows.draft_mass, mask=rows.drafted)
    tl.debug_barrier()
    if num_candidates == 0:
        resolve(
            batch, draft, scratch, out, request, temperature, rows, rows.exists == 0,
            tl.where(passes, num_usable, 0), num_drafts + 1, "block", True, USE_FP64, GROUP, GROUPS, LANES, LIST,
            LISTS, WIDTH,
        )  # fmt: skip


@triton.jit
def residual_mass(
    batch,
    draft,
    row,
    draft_row,
    split,
    num_splits,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,
    weight,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TURNS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Mass of max(weight p - q, 0) over every num_splits-th tile; of a sparse q all of it, from the listed tokens."""
    logits = batch.logits + row * batch.logits_stride
    draft_logits = draft.logits + draft_row * draft.logits_stride
    if draft.token_ids is None:
        sums = compute_type(tl.zeros([TILE], tl.float32), USE_FP64)
        p_share = (weight / mass).to(tl.float32)
        q_share = (1.0 / draft_mass).to(tl.float32)
        for turn in range(TURNS):
            column = tile_columns(turn, split, num_splits, TILE, GROUP)
            inside = column < batch.vocab
            x = load_logits(logits + column, inside)
            y = load_dense_draft(draft_logits, draft.column_of, column, inside)
            p = exponents(x, top.to(tl.float32), temperature) * p_share
            q = exponents(y, draft_top.to(tl.float32), temperature) * q_share
            sums += group_sum(tl.maximum(p - q, 0.0))
        total = tl.sum(sums, 0)
    else:
        ids = draft.token_ids + draft_row * draft.token_ids_stride
        unlisted = compute_type(tl.full([], 1.0, tl.float32), USE_FP64)
        kept = compute_type(tl.full([], 0.0, tl.float32), USE_FP64)
        for turn in range(LISTS):
            place = turn * LIST + tl.arange(0, LIST)
            listed = place < draft.width
            token = tl.load(ids + place, mask=listed, other=-1)
            listed &= (token >= 0) & (token < batch.vocab)
            x = load_logits(logits + token, listed)
            y = load_logits(draft_logits + place, listed)
            p = probability(x, top.to(tl.float32), mass, temperature, USE_FP64)
            q = probability(y, draft_top.to(tl.float32), draft_mass, temperature, USE_FP64)
            unlisted -= tl.sum(p, 0)
            kept += tl.sum(tl.maximum(weight * p - q, 0.0), 0)
        total = tl.where(split == 0, kept + weight * tl.maximum(unlisted, 0.0), 0.0)
    return total


@triton.jit(do_not_specialize=["num_requests", "launch", "test", "rows"])
def block_kernel(
    batch,
    draft,
    scratch,
    out,
    num_requests,
    launch,
    test,  # place of the first candidate tested in the request's list
    rows,  # most rows of a request
    count,  # candidates tested
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Tests `count` candidates of each open request; draws when one passes or the list ends."""
    block = scratch.block
    num_splits = scratch.num_splits
    split = tl.program_id(0) % num_splits
    place = (tl.program_id(0) // num_splits) % count
    request = tl.program_id(0) // (num_splits * count)
    if tl.load(scratch.done + request) != 0:
        return
    num_candidates = tl.load(block.num_candidates + request)
    if test + place >= num_candidates:
        return
    first_row, first_draft, num_drafts = request_rows(batch, request)
    temperature = tl.load(batch.temperature + request)
    prefix = tl.load(block.candidates + first_row + test + place)
    row = first_row + prefix
    part = residual_mass(
        batch, draft, row, first_draft + prefix, split, num_splits, temperature, tl.load(block.statistics + row * 4),
        tl.load(block.statistics + row * 4 + 1), tl.load(block.statistics + row * 4 + 2),
        tl.load(block.statistics + row * 4 + 3), tl.load(block.weight + row), USE_FP64, TILE, GROUP, TURNS, LIST, LISTS,
    )  # fmt: skip
    parts = block.mass + request.to(tl.int64) * count * num_splits
    tl.store(parts + place * num_splits + split, part)
    tested = tl.minimum(count, num_candidates - test)
    if is_last(scratch.arrived + launch * num_requests + request, tested * num_splits):
        slot = tl.arange(0, COUNT)
        splits = tl.arange(0, SPLITS)[None, :]
        mask = (slot < tested)[:, None] & (splits < num_splits)
        index = slot[:, None] * num_splits + splits
        mass = tl.sum(tl.load(parts + index, mask=mask, other=0.0, cache_modifier=".cg"), 1)
        prefixes = tl.load(block.candidates + first_row + test + slot, mask=slot < tested, other=0)
        weight = tl.load(block.weight + first_row + prefixes)
        total = mass + 1.0 - weight
        threshold = tl.where(total > 0, mass / tl.where(total > 0, total, 1.0), 0.0)
        known = load_rows(batch, draft, scratch, request, 0, rows, temperature, True, USE_FP64, ROWS, SPLITS)
        chosen = prefixes[:, None] - 1 == known.offset[None, :]
        uniform = tl.sum(tl.where(chosen, known.uniform[None, :], 0.0), 1)
        accepted = tl.max(tl.where((slot < tested) & (uniform < threshold), prefixes, 0), 0)
        if (accepted > 0) | (test + count >= num_candidates):
            resolve(
                batch, draft, scratch, out, request, temperature, known, known.exists == 0, accepted, num_drafts + 1,
                "block", True, USE_FP64, GROUP, GROUPS, LANES, LIST, LISTS, WIDTH,
            )  # fmt: skip
