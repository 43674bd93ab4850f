"""Block verification with draft logits: the drafts of a step are decided together (Sun et al. 2403.10444).

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), i drafts pass when u_i < h_i; h_i is s_i / (s_i + 1 - w_i), s_i the
mass of max(w_i p - q, 0) in the row after them, and h = w after the last usable draft. The longest passing prefix is
accepted. Prefixes are tested from the longest down, and since h_i <= w_i, the mass of a row is summed only when
u_i < w_i and every longer prefix has failed.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at, is_last, request_rows
from draftwire_kernels.gpu.noise import accept_uniform
from draftwire_kernels.gpu.race import compute_type, probability
from draftwire_kernels.gpu.resolve import load_rows, resolve
from draftwire_kernels.gpu.scan import NO_INDEX, load_logits


@triton.jit
def next_tested(scratch, first_row, rows, below):
    """The longest prefix under `below` that may pass, 0 if there is none."""
    weight = tl.load(scratch.weight + first_row + rows.offset + 1, mask=rows.drafted, other=0.0, cache_modifier=".cg")
    may_pass = rows.drafted & (rows.offset + 1 < below) & (rows.uniform < weight)
    return tl.max(tl.where(may_pass, rows.offset + 1, 0), 0)


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
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Weights of all prefixes, and the test of the longest; leaves the rest to `block_kernel`."""
    first_row, first_draft, num_drafts = request_rows(batch, request)
    usable = (rows.ended == 0) & (rows.top > float("-inf"))
    num_usable = tl.minimum(tl.min(tl.where(rows.drafted & (usable == 0), rows.offset, NO_INDEX), 0), num_drafts)
    ratio = tl.where(rows.offset < num_usable, rows.p / rows.q, 0.0)
    weight = compute_type(tl.full([], 1.0, tl.float32), USE_FP64)
    tl.store(scratch.weight + first_row, weight)
    for i in range(ROWS):
        weight = tl.minimum(weight * at(ratio, rows.offset, i), 1.0)
        tl.store(scratch.weight + first_row + i + 1, weight, mask=i < num_drafts)
    tl.debug_barrier()
    last_weight = tl.load(scratch.weight + first_row + num_usable, cache_modifier=".cg")
    tested = num_usable
    passes = (num_usable == 0) | (at(rows.uniform, rows.offset, num_usable - 1) < last_weight)
    if passes == 0:
        tested = next_tested(scratch, first_row, rows, num_usable)
    tl.store(scratch.tested + request, tested)
    if passes | (tested == 0):
        resolve(
            batch, draft, scratch, out, request, temperature, rows, rows.exists == 0, tested, num_drafts + 1, "block",
            True, USE_FP64, GROUP, GROUPS, LIST, LISTS, WIDTH,
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
        within = tl.arange(0, TILE)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        sums = compute_type(tl.zeros([TILE], tl.float32), USE_FP64)
        for turn in range(TURNS):
            tile = split + turn * num_splits
            column = tile * (TILE * GROUP) + within
            x = load_logits(logits + column, column < batch.vocab)
            y = load_logits(draft_logits + column, column < batch.vocab)
            p = probability(x, top, mass, temperature, USE_FP64)
            q = probability(y, draft_top, draft_mass, temperature, USE_FP64)
            sums += tl.sum(tl.maximum(weight * p - q, 0.0), 1)
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
            p = probability(x, top, mass, temperature, USE_FP64)
            q = probability(y, draft_top, draft_mass, temperature, USE_FP64)
            unlisted -= tl.sum(p, 0)
            kept += tl.sum(tl.maximum(weight * p - q, 0.0), 0)
        total = tl.where(split == 0, kept + weight * tl.maximum(unlisted, 0.0), 0.0)
    return total


@triton.jit(do_not_specialize=["num_requests", "launch", "count"])
def block_kernel(
    batch,
    draft,
    scratch,
    out,
    mass_parts,  # [B, S]
    num_requests,
    launch,
    count,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Tests one prefix of each open request; draws when it passes or when no shorter one may."""
    num_splits = scratch.num_splits
    split = tl.program_id(0) % num_splits
    request = tl.program_id(0) // num_splits
    if tl.load(scratch.done + request) != 0:
        return
    first_row, first_draft, num_drafts = request_rows(batch, request)
    temperature = tl.load(batch.temperature + request)
    tested = tl.load(scratch.tested + request)
    weight = tl.load(scratch.weight + first_row + tested)
    rows = load_rows(batch, draft, scratch, request, 0, count, temperature, True, USE_FP64, ROWS, SPLITS)
    part = residual_mass(
        batch, draft, first_row + tested, first_draft + tested, split, num_splits, temperature,
        at(rows.top, rows.offset, tested), at(rows.mass, rows.offset, tested), at(rows.draft_top, rows.offset, tested),
        at(rows.draft_mass, rows.offset, tested), weight, USE_FP64, TILE, GROUP, TURNS, LIST, LISTS,
    )  # fmt: skip
    tl.store(mass_parts + request.to(tl.int64) * num_splits + split, part)
    if is_last(scratch.arrived + launch * num_requests + request, num_splits):
        splits = tl.arange(0, SPLITS)
        parts = mass_parts + request.to(tl.int64) * num_splits + splits
        mass = tl.sum(tl.load(parts, mask=splits < num_splits, other=0.0, cache_modifier=".cg"), 0)
        total = mass + 1.0 - weight
        threshold = tl.where(total > 0, mass / total, 0.0)
        passes = at(rows.uniform, rows.offset, tested - 1) < threshold
        if passes == 0:
            tested = next_tested(scratch, first_row, rows, tested)
        tl.store(scratch.tested + request, tested)
        if passes | (tested == 0):
            resolve(
                batch, draft, scratch, out, request, temperature, rows, rows.exists == 0, tested, num_drafts + 1,
                "block", True, USE_FP64, GROUP, GROUPS, LIST, LISTS, WIDTH,
            )  # fmt: skip
