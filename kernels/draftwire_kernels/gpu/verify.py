"""Verification kernel: statistics of target and draft rows, and, by the last program of a request, its tokens."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import emit, is_last, request_rows
from draftwire_kernels.gpu.block import begin_block
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.resolve import load_rows, resolve
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, maximum_or_nan, scan_draft, scan_greedy, scan_sampled


@triton.jit(do_not_specialize=["num_requests", "begin", "count", "launch"])
def verify_kernel(
    batch,
    draft,
    scratch,
    out,
    num_requests,
    begin,  # rows begin .. begin + count - 1 of each request are read
    count,
    launch,
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
    DRAFT_GROUP: tl.constexpr,
    DRAFT_TURNS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    num_splits = scratch.num_splits
    split = program % num_splits
    offset = begin + (program // num_splits) % count
    request = program // (num_splits * count)
    first_row, first_draft, num_drafts = request_rows(batch, request)
    if offset > num_drafts:
        return
    if begin > 0:  # noqa: SIM102
        if tl.load(scratch.done + request) != 0:
            return
    row = first_row + offset
    temperature = tl.load(batch.temperature + request)
    logits = batch.logits + row * batch.logits_stride
    part = row * num_splits + split
    if temperature > 0:
        position = tl.load(batch.position + request) + offset
        state = row_state(tl.load(batch.resample + request), position, offset * 0)
        group = row * scratch.num_groups
        top, mass = scan_sampled(
            logits, None, batch.vocab, temperature, state, split, num_splits, scratch.group_top + group,
            scratch.lane_floor + group * LANES, METHOD != "coupled", USE_FP64, TILE, GROUP, LANES, TURNS,
        )  # fmt: skip
        tl.store(scratch.part_top + part, top)
        tl.store(scratch.part_mass + part, mass)
        if HAS_DRAFT_LOGITS:  # noqa: SIM102
            if offset < num_drafts:
                draft_row = first_draft + offset
                token = tl.load(batch.draft_tokens + draft_row)
                ids = draft.token_ids
                if draft.token_ids is not None:
                    ids += draft_row * draft.token_ids_stride
                draft_top, draft_mass, token_mass = scan_draft(
                    draft.logits + draft_row * draft.logits_stride, ids, draft.width, temperature, token, split,
                    num_splits, draft.token_ids is not None, USE_FP64, TILE, DRAFT_GROUP, DRAFT_TURNS,
                )  # fmt: skip
                part = draft_row * num_splits + split
                tl.store(scratch.draft_top + part, draft_top)
                tl.store(scratch.draft_mass + part, draft_mass)
                if draft.token_ids is not None:
                    tl.store(scratch.draft_token_mass + part, token_mass)
    else:
        top, index = scan_greedy(logits, batch.vocab, split, num_splits, TILE, GROUP, TURNS)
        tl.store(scratch.part_top + part, top)
        tl.store(scratch.part_mass + part, index.to(tl.float32))

    end = tl.minimum(begin + count, num_drafts + 1)
    if is_last(scratch.arrived + launch * num_requests + request, (end - begin) * num_splits):
        if temperature > 0:
            rows = load_rows(
                batch, draft, scratch, request, begin, count, temperature, HAS_DRAFT_LOGITS, USE_FP64, ROWS, SPLITS
            )
            if METHOD == "block":
                begin_block(
                    batch, draft, scratch, out, request, temperature, rows, USE_FP64, GROUP, GROUPS, LANES, LIST,
                    LISTS, ROWS, WIDTH,
                )  # fmt: skip
            else:
                usable = (rows.ended == 0) & (rows.top > -INFINITY)
                if METHOD == "coupled":
                    refused = rows.exists == 0
                    accepted = begin
                else:
                    if METHOD == "synthetic":
                        rate = tl.load(batch.rates + rows.offset, mask=rows.drafted, other=0.0)
                        passes = rows.uniform < rate
                    else:
                        passes = rows.uniform < rows.p / rows.q
                    refused = rows.drafted & ((usable & passes) == 0)
                    accepted = tl.minimum(tl.min(tl.where(refused, rows.offset, NO_INDEX), 0), num_drafts)
                resolve(
                    batch, draft, scratch, out, request, temperature, rows, refused, accepted, end, METHOD,
                    HAS_DRAFT_LOGITS, USE_FP64, GROUP, GROUPS, LANES, LIST, LISTS, WIDTH,
                )  # fmt: skip
        else:
            resolve_greedy(batch, scratch, out, request, begin, end, METHOD, USE_FP64, ROWS, SPLITS, WIDTH)


@triton.jit
def resolve_greedy(
    batch,
    scratch,
    out,
    request,
    begin,
    end,
    METHOD: tl.constexpr,
    USE_FP64: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """At temperature 0 drafts are accepted while they are the argmax of their row, and an argmax is emitted."""
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
    if accepted < end:
        emitted = tl.where(top > -INFINITY, best, -1)
        emit(batch, out, request, first_draft, accepted, tl.sum(tl.where(offset == accepted, emitted, 0), 0), WIDTH)
        tl.store(scratch.done + request, 1)
