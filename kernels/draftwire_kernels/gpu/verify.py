"""Verification in one launch: statistics of target and draft rows, and a wave's decision in its last program."""

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
from draftwire_kernels.gpu.draw import load_lists, load_rows
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.resolve import combine_rows, load_drafted, load_parts, load_tokens, resolve, row_piece
from draftwire_kernels.gpu.scan import (
    INFINITY,
    NO_INDEX,
    load_logits,
    load_tile,
    maximum_or_nan,
    scan_groups,
    scan_masses,
    scan_sampled,
    scan_tops,
)


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
    DRAFT_GROUP: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WAVES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    split = program % SPLITS
    place = program // SPLITS
    if ROWS == 1:
        count = 1
    wave = place // (num_requests * count)
    place -= wave * (num_requests * count)
    begin = wave * count
    request = place // count
    offset = begin + place % count
    first_row, first_draft, num_drafts = request_rows(batch, request)
    if offset > num_drafts:
        return
    is_needless = request < 0
    if WAVES > 1:
        is_needless = is_decided_before(scratch.waves, request, wave)
    # First, because this load takes longest.
    num_columns = tl.where(is_needless, 0, batch.vocab)
    x = load_tile(batch.logits + (first_row + offset) * batch.logits_stride, split, num_columns, TILE, GROUP, LINE)
    temperature = tl.load(batch.temperature + request)
    key, position = tl.load(batch.resample + request), tl.load(batch.position + request)
    tokens = load_tokens(batch, first_draft, num_drafts, begin, count, ROWS)
    if is_needless == 0:
        read_row(
            x, batch, draft, scratch, request, wave, first_row, first_draft, num_drafts, offset, split, temperature,
            key, position + offset, METHOD, HAS_DRAFT_LOGITS and LISTS == 0, USE_FP64, TILE, GROUP, LINE,
            DRAFT_GROUP, SPLITS, WAVES,
        )  # fmt: skip

    # Loaded by all programs before the last one is known, which shortens the wait of the last one.
    drafted = load_drafted(
        batch, draft, first_row, first_draft, num_drafts, begin, count, tokens, HAS_DRAFT_LOGITS, ROWS
    )
    lists = None
    if LISTS > 0:
        lists = load_lists(draft, first_draft + drafted.offset, drafted.drafted, 0, LIST)
    end = tl.minimum(begin + count, num_drafts + 1)
    if is_last(scratch.waves.arrived + wave * num_requests + request, (end - begin) * SPLITS):
        accepted = end
        token = tl.full([], -1, tl.int32)
        decided = accepted < 0
        drafts = load_drafts(batch, request, WIDTH)
        accept = tl.load(batch.accept + request)
        parts = load_parts(
            draft, scratch, first_row, first_draft, drafted, METHOD, HAS_DRAFT_LOGITS, GROUPS, SPLITS * TILE
        )
        groups, piece = None, None
        if ROWS == 1 and METHOD != "block":
            groups = tl.reshape(parts.top, [GROUPS]), tl.reshape(parts.mass, [GROUPS])
            if LISTS > 0:
                piece = row_piece(batch, first_row + begin, lists, LIST)
        if WAVES > 1:
            # If a program of this wave has skipped a row, this read sees the same decision.
            is_needless = is_decided_before(scratch.waves, request, wave)
        if is_needless == 0:
            if temperature > 0:
                rows = combine_rows(
                    draft, first_draft, drafted, parts, lists, temperature, accept, position, HAS_DRAFT_LOGITS,
                    USE_FP64, ROWS, LIST, LISTS,
                )  # fmt: skip
                if METHOD == "block":
                    begin_block(batch, scratch, request, rows, USE_FP64, ROWS)
                else:
                    refused, accepted = first_refusal(batch, rows, accept, position, begin, num_drafts, METHOD)
                    if WAVES > 1:
                        announce(scratch.waves, request, wave, at(refused.to(tl.int32), rows.offset, accepted) != 0)
                    accepted, token, decided = resolve(
                        batch, draft, scratch, request, temperature, key, position, rows, groups, piece,
                        accepted, end, METHOD, HAS_DRAFT_LOGITS, USE_FP64, GROUP, GROUPS, LIST, LISTS,
                    )  # fmt: skip
            else:
                if METHOD == "block":
                    tl.store(scratch.block.prefixes + request, 0)
                accepted, token, decided = resolve_greedy(
                    batch, scratch, request, begin, end, METHOD, USE_FP64, ROWS, GROUP, GROUPS
                )
        if (METHOD != "block") | (temperature == 0):
            num_waves = tl.cdiv(num_drafts + 1, count)
            close_wave(scratch.waves, out, request, drafts, wave, num_waves, accepted, token, decided, WAVES, WIDTH)


@triton.jit
def read_row(
    x,  # the first tile
    batch,
    draft,
    scratch,
    request,
    wave,
    first_row,
    first_draft,
    num_drafts,
    offset,
    split,
    temperature,
    key,  # of the row's noise
    position,
    METHOD: tl.constexpr,
    WITH_DRAFT: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    DRAFT_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    WAVES: tl.constexpr,
):
    """Compute the statistics of a split of a row and of its draft's row."""
    row = first_row + offset
    logits = batch.logits + row * batch.logits_stride
    groups = row * scratch.num_groups
    group_top = scratch.group_top + groups
    if WITH_DRAFT:
        draft_row = first_draft + offset
        draft_logits = draft.logits + draft_row * draft.logits_stride
        has_draft = (offset < num_drafts) & (temperature > 0)
        width = tl.where(has_draft, draft.width, 0)
    if METHOD == "coupled":
        if temperature > 0:
            scan_sampled(
                x, logits, None, batch.vocab, temperature, key, position, offset * 0, split, group_top,
                scratch.group_mass + groups, TILE, GROUP, LINE, SPLITS,
            )  # fmt: skip
        else:
            scan_tops(x, logits, batch.vocab, split, group_top, TILE, GROUP, LINE, SPLITS)
    elif METHOD == "block":
        if temperature > 0:
            part = (row * SPLITS + split) * TILE
            scan_masses(
                x, logits, batch.vocab, temperature, split, scratch.part_top + part, scratch.part_mass + part, True,
                USE_FP64, TILE, GROUP, LINE, SPLITS,
            )  # fmt: skip
        else:
            scan_tops(x, logits, batch.vocab, split, group_top, TILE, GROUP, LINE, SPLITS)
    else:
        group_mass = scratch.group_mass + groups
        scan_groups(x, logits, batch.vocab, temperature, split, group_top, group_mass, TILE, GROUP, LINE, SPLITS)
    if WITH_DRAFT:
        if WAVES > 1:
            # The draft's row is skipped if an earlier wave has decided in the meantime. As with skipped target rows,
            # this does not change the result: the program that closes this wave sees the decision as well and samples
            # nothing, and `first_decision` ignores this wave.
            width = tl.where(is_decided_before(scratch.waves, request, wave), 0, width)
        part = (draft_row * SPLITS + split) * TILE
        scan_masses(
            None, draft_logits, width, temperature, split, scratch.draft_top + part, scratch.draft_mass + part,
            has_draft, USE_FP64, TILE, DRAFT_GROUP, 128, SPLITS,
        )  # fmt: skip


@triton.jit
def draft_rate(batch, accept, position, offset, drafted):
    """Return the synthetic rates of drafts; `draftwire_kernels.draft_rates`."""
    place = (row_state(accept, position + offset, offset) & (batch.num_rates - 1)).to(tl.int32)
    return tl.load(batch.rates + offset * batch.num_rates + place, mask=drafted, other=0.0)


@triton.jit
def first_refusal(batch, rows, accept, position, begin, num_drafts, METHOD: tl.constexpr):
    """Return which drafts of the wave are rejected, and the first one (none for "coupled", whose samples decide)."""
    if METHOD == "coupled":
        refused = rows.exists == 0
        accepted = begin
    else:
        if METHOD == "synthetic":
            passes = rows.uniform < draft_rate(batch, accept, position, rows.offset, rows.drafted)
        else:
            passes = rows.uniform < rows.p / rows.q
        usable = (rows.ended == 0) & (rows.top > -INFINITY)
        refused = rows.drafted & ((usable & passes) == 0)
        accepted = tl.minimum(tl.min(tl.where(refused, rows.offset, NO_INDEX), 0), num_drafts)
    return refused, accepted


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
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Accept drafts while they are the argmax of their row, and emit an argmax (temperature 0); return as `resolve`."""
    first_row, first_draft, num_drafts = request_rows(batch, request)
    offset = begin + tl.arange(0, ROWS)
    exists = offset < end
    drafted = exists & (offset < num_drafts)
    row = first_row + offset
    group_top, _ = load_rows(scratch.group_top, scratch.group_top, row, exists, scratch.num_groups, GROUPS)
    top = maximum_or_nan(group_top, 1)
    group = tl.min(tl.where(group_top == top[:, None], tl.arange(0, GROUPS)[None, :], GROUPS), 1)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(
        batch.logits + row[:, None] * batch.logits_stride + column, exists[:, None] & (column < batch.vocab)
    )
    best = tl.min(tl.where(x == top[:, None], column, NO_INDEX), 1)
    token = tl.load(batch.draft_tokens + first_draft + offset, mask=drafted, other=-1)
    if METHOD == "synthetic":
        accept, position = tl.load(batch.accept + request), tl.load(batch.position + request)
        uniform = accept_uniform(accept, position + offset, offset, USE_FP64)
        passes = uniform < draft_rate(batch, accept, position, offset, drafted)
        passes &= (token >= 0) & (token < batch.vocab)
    else:
        passes = token == best
    refused = drafted & ((passes & (top > -INFINITY)) == 0)
    accepted = tl.minimum(tl.min(tl.where(refused, offset, NO_INDEX), 0), num_drafts)
    emitted = tl.where(top > -INFINITY, best, -1)
    return accepted, tl.sum(tl.where(offset == accepted, emitted, 0), 0), accepted < end
