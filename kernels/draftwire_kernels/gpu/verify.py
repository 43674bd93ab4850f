"""Verification in one launch: statistics of target and draft rows, and, by the last program of a wave, its decision."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import (
    announce,
    at,
    close_wave,
    is_decided_before,
    is_last,
    load_drafts,
    request_rows,
)
from draftwire_kernels.gpu.block import begin_block
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.resolve import (
    combine_rows,
    load_drafted,
    load_parts,
    load_row_groups,
    load_tokens,
    resolve,
)
from draftwire_kernels.gpu.scan import (
    INFINITY,
    NO_INDEX,
    maximum_or_nan,
    scan_draft,
    scan_greedy,
    scan_list,
    scan_sampled,
)

_SURE_MASS = tl.constexpr(1e-3)


@triton.jit(do_not_specialize=["num_requests", "count"])
def verify_kernel(
    batch,
    draft,
    scratch,
    out,
    num_requests,
    count,  # rows of a request in a wave
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
    DRAFT_GROUP: tl.constexpr,
    DRAFT_TURNS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WAVES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # A program is a split of a row's target logits; with lists of draft logits one more program a row takes the list.
    IS_LISTED: tl.constexpr = LISTS > 0
    num_splits = scratch.num_splits
    programs_each = num_splits + 1 if IS_LISTED else num_splits
    program = tl.program_id(0)
    split = program % programs_each
    place = program // programs_each
    wave = place // (num_requests * count)
    begin = wave * count
    offset = begin + place % count
    request = (place // count) % num_requests
    first_row, first_draft, num_drafts = request_rows(batch, request)
    takes_list = split == num_splits
    if offset + takes_list.to(tl.int32) > num_drafts:
        return
    # Loaded before the question whether the row is needed at all, which waits for memory too.
    temperature = tl.load(batch.temperature + request)
    state = row_state(tl.load(batch.resample + request), tl.load(batch.position + request) + offset, offset * 0)
    tokens = load_tokens(batch, first_draft, num_drafts, begin, count, ROWS)
    is_needless = request < 0
    if WAVES > 1:
        is_needless = is_decided_before(scratch.waves, request, wave)
    if is_needless == 0:
        if IS_LISTED:
            if takes_list:
                if temperature > 0:
                    read_list(
                        batch, draft, scratch, first_row + offset, first_draft + offset, temperature, USE_FP64, LIST,
                        LISTS,
                    )  # fmt: skip
            else:
                read_row(
                    batch, draft, scratch, first_row, first_draft, num_drafts, offset, split, temperature, state,
                    METHOD, False, USE_FP64, TILE, GROUP, LINE, LANES, TURNS, DRAFT_GROUP, DRAFT_TURNS,
                )  # fmt: skip
        else:
            read_row(
                batch, draft, scratch, first_row, first_draft, num_drafts, offset, split, temperature, state, METHOD,
                HAS_DRAFT_LOGITS, USE_FP64, TILE, GROUP, LINE, LANES, TURNS, DRAFT_GROUP, DRAFT_TURNS,
            )  # fmt: skip

    # Loaded by all programs, before one of them knows that it is the last and decides: it waits for less then.
    drafted = load_drafted(
        batch, draft, first_row, first_draft, num_drafts, begin, count, tokens, HAS_DRAFT_LOGITS, ROWS
    )
    end = tl.minimum(begin + count, num_drafts + 1)
    expected = (end - begin) * num_splits
    if IS_LISTED:
        expected += tl.minimum(end, num_drafts) - begin
    if is_last(scratch.waves.arrived + wave * num_requests + request, expected):
        accepted = end
        token = tl.full([], -1, tl.int32)
        decided = accepted < 0
        drafts = load_drafts(batch, request, WIDTH)
        parts = load_parts(draft, scratch, first_row, first_draft, drafted, HAS_DRAFT_LOGITS, SPLITS)
        groups = None
        if ROWS == 1 and LANES == 1 and METHOD != "block":
            groups = load_row_groups(scratch, first_row + begin, GROUPS, LANES)
        if WAVES > 1:
            # Where a program of this wave has left out its row, this load sees what it saw.
            is_needless = is_decided_before(scratch.waves, request, wave)
        if is_needless == 0:
            if temperature > 0:
                rows = combine_rows(
                    batch, draft, request, drafted, parts, temperature, HAS_DRAFT_LOGITS, USE_FP64, ROWS
                )
                if METHOD == "block":
                    begin_block(batch, scratch, request, rows, USE_FP64, ROWS)
                else:
                    refused, accepted = first_refusal(batch, rows, begin, num_drafts, METHOD)
                    if WAVES > 1:
                        is_final = is_final_refusal(rows, refused, METHOD, HAS_DRAFT_LOGITS)
                        announce(scratch.waves, request, wave, at(is_final.to(tl.int32), rows.offset, accepted) != 0)
                    accepted, token, decided = resolve(
                        batch, draft, scratch, request, temperature, rows, groups, refused, accepted, end, METHOD,
                        HAS_DRAFT_LOGITS, USE_FP64, GROUP, GROUPS, LINE, LANES, LIST, LISTS,
                    )  # fmt: skip
            else:
                if METHOD == "block":
                    tl.store(scratch.block.prefixes + request, 0)
                accepted, token, decided = resolve_greedy(
                    batch, scratch, request, begin, end, METHOD, USE_FP64, ROWS, SPLITS
                )
        if (METHOD != "block") | (temperature == 0):
            num_waves = tl.cdiv(num_drafts + 1, count)
            close_wave(
                scratch.waves, out, request, drafts, wave, num_waves, accepted, token, decided, WAVES, WIDTH
            )


@triton.jit
def read_row(
    batch,
    draft,
    scratch,
    first_row,
    first_draft,
    num_drafts,
    offset,
    split,
    temperature,
    state,  # of the row's noise
    METHOD: tl.constexpr,
    WITH_DRAFT: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
    DRAFT_GROUP: tl.constexpr,
    DRAFT_TURNS: tl.constexpr,
):
    """Statistics of a split of a row."""
    row = first_row + offset
    logits = batch.logits + row * batch.logits_stride
    num_splits = scratch.num_splits
    part = row * num_splits + split
    if temperature > 0:
        group_top, lane_floor = scratch.group_top, scratch.lane_floor
        if METHOD != "block":
            group_top += row * scratch.num_groups
            lane_floor += row * scratch.num_groups * LANES
        top, mass = scan_sampled(
            logits, None, batch.vocab, temperature, state, split, num_splits, group_top, lane_floor,
            METHOD != "block", METHOD != "coupled", USE_FP64, TILE, GROUP, LINE, LANES, TURNS,
        )  # fmt: skip
        tl.store(scratch.part_top + part, top)
        tl.store(scratch.part_mass + part, mass)
        if WITH_DRAFT:  # noqa: SIM102
            if offset < num_drafts:
                draft_row = first_draft + offset
                draft_top, draft_mass = scan_draft(
                    draft.logits + draft_row * draft.logits_stride, draft.width, temperature, split, num_splits,
                    USE_FP64, TILE, DRAFT_GROUP, 128, DRAFT_TURNS,
                )  # fmt: skip
                part = draft_row * num_splits + split
                tl.store(scratch.draft_top + part, draft_top)
                tl.store(scratch.draft_mass + part, draft_mass)
    else:
        top, index = scan_greedy(logits, batch.vocab, split, num_splits, TILE, GROUP, LINE, TURNS)
        tl.store(scratch.part_top + part, top)
        tl.store(scratch.part_mass + part, index.to(tl.float32))


@triton.jit
def read_list(
    batch,
    draft,
    scratch,
    row,
    draft_row,
    temperature,
    USE_FP64: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Statistics of the draft logits that a row lists."""
    top, mass, token_mass = scan_list(
        batch.logits + row * batch.logits_stride, batch.vocab, draft.logits + draft_row * draft.logits_stride,
        draft.token_ids + draft_row * draft.token_ids_stride, draft.width, temperature,
        tl.load(batch.draft_tokens + draft_row), scratch.target_at_ids + draft_row * draft.width, USE_FP64, LIST, LISTS,
    )  # fmt: skip
    tl.store(scratch.draft_top + draft_row, top)
    tl.store(scratch.draft_mass + draft_row, mass)
    tl.store(scratch.draft_token_mass + draft_row, token_mass)


@triton.jit
def first_refusal(batch, rows, begin, num_drafts, METHOD: tl.constexpr):
    """Which drafts of the wave are refused, and the first of them ("coupled": none, its draws decide)."""
    if METHOD == "coupled":
        refused = rows.exists == 0
        accepted = begin
    else:
        if METHOD == "synthetic":
            passes = rows.uniform < tl.load(batch.rates + rows.offset, mask=rows.drafted, other=0.0)
        else:
            passes = rows.uniform < rows.p / rows.q
        usable = (rows.ended == 0) & (rows.top > -INFINITY)
        refused = rows.drafted & ((usable & passes) == 0)
        accepted = tl.minimum(tl.min(tl.where(refused, rows.offset, NO_INDEX), 0), num_drafts)
    return refused, accepted


@triton.jit
def is_final_refusal(rows, refused, METHOD: tl.constexpr, HAS_DRAFT_LOGITS: tl.constexpr):
    """Which refusals stand whatever is drawn.

    One without anything left to draw would count as acceptance. Without q there is always something, since a draft that
    has all the mass is not refused. With q the residual's mass is at least q - p at the draft, and where that is more
    than `_SURE_MASS` it does not vanish in the rounding of its terms, 1 in 10**6.
    """
    is_final = refused
    if HAS_DRAFT_LOGITS and METHOD != "synthetic":
        is_final &= (rows.ended != 0) | ~(rows.top > -INFINITY) | (rows.q - rows.p > _SURE_MASS)
    return is_final


@triton.jit
def resolve_greedy(
    batch,
    scratch,
    request,
    begin,
    end,
    METHOD: tl.constexpr,
    USE_FP64: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """At temperature 0 drafts are accepted while they are the argmax of their row, and an argmax is emitted. Returns
    what `resolve` returns."""
    first_row, first_draft, num_drafts = request_rows(batch, request)
    offset = begin + tl.arange(0, ROWS)
    exists = offset < end
    drafted = exists & (offset < num_drafts)
    split = tl.arange(0, SPLITS)[None, :]
    index = (first_row + offset)[:, None] * scratch.num_splits + split
    mask = exists[:, None] & (split < scratch.num_splits)
    part_top = tl.load(scratch.part_top + index, mask=mask, other=-INFINITY, cache_modifier=".cg")
    part_index = tl.load(scratch.part_mass + index, mask=mask, other=0.0, cache_modifier=".cg").to(tl.int32)
    top = maximum_or_nan(part_top, 1)
    best = tl.min(tl.where(part_top == top[:, None], part_index, NO_INDEX), 1)
    token = tl.load(batch.draft_tokens + first_draft + offset, mask=drafted, other=-1)
    if METHOD == "synthetic":
        position = tl.load(batch.position + request) + offset
        uniform = accept_uniform(tl.load(batch.accept + request), position, offset, USE_FP64)
        passes = uniform < tl.load(batch.rates + offset, mask=drafted, other=0.0)
        passes &= (token >= 0) & (token < batch.vocab)
    else:
        passes = token == best
    refused = drafted & ((passes & (top > -INFINITY)) == 0)
    accepted = tl.minimum(tl.min(tl.where(refused, offset, NO_INDEX), 0), num_drafts)
    emitted = tl.where(top > -INFINITY, best, -1)
    return accepted, tl.sum(tl.where(offset == accepted, emitted, 0), 0), accepted < end
