"""From the statistics of a request's rows to its emitted tokens."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at, request_rows
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.race import (
    compute_type,
    lane_bounds,
    probability,
    race_of_residual,
    race_of_sparse_residual,
    race_of_target,
)
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, exponents, load_dense_draft, load_logits, maximum_or_nan


class Rows(NamedTuple):
    """Statistics of up to ROWS consecutive rows of one request, vectors [ROWS] in registers."""

    offset: Any  # place of the row in the request
    exists: Any
    drafted: Any  # the row verifies a draft
    token: Any  # that draft
    top: Any
    mass: Any  # at temperature 0 the index of the largest logit
    draft_top: Any
    draft_mass: Any
    p: Any  # of the draft
    q: Any
    ended: Any  # the draft is not in the support of its q: no draft counts from here on
    uniform: Any


@triton.jit
def combined(top_ptr, mass_ptr, row, exists, num_splits, temperature, SPLITS: tl.constexpr):
    """Maximum and mass [ROWS] of rows whose parts [SPLITS] were left by several programs."""
    split = tl.arange(0, SPLITS)[None, :]
    index = row[:, None] * num_splits + split
    mask = exists[:, None] & (split < num_splits)
    part_top = tl.load(top_ptr + index, mask=mask, other=-INFINITY, cache_modifier=".cg")
    part_mass = tl.load(mass_ptr + index, mask=mask, other=0.0, cache_modifier=".cg")
    top = maximum_or_nan(part_top, 1)
    return top, tl.sum(part_mass * exponents(part_top, top[:, None], temperature), 1)


@triton.jit
def load_rows(
    batch,
    draft,
    scratch,
    request,
    begin,
    count,
    temperature,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Statistics of the rows begin .. begin + count - 1 of a request at a temperature above 0."""
    first_row, first_draft, num_drafts = request_rows(batch, request)
    index = tl.arange(0, ROWS)
    offset = begin + index
    exists = (index < count) & (offset <= num_drafts)
    drafted = exists & (offset < num_drafts)
    row = first_row + offset
    draft_row = first_draft + offset
    token = tl.load(batch.draft_tokens + draft_row, mask=drafted, other=-1)
    known = (token >= 0) & (token < batch.vocab)
    num_splits = scratch.num_splits
    top, mass = combined(scratch.part_top, scratch.part_mass, row, exists, num_splits, temperature, SPLITS)
    x = load_logits(batch.logits + row * batch.logits_stride + token, drafted & known)
    p = probability(x, tl.where(top == -INFINITY, 0.0, top), mass, temperature, USE_FP64)
    ended = ~known
    if HAS_DRAFT_LOGITS:
        if draft.token_ids is None:
            draft_top, draft_mass = combined(
                scratch.draft_top, scratch.draft_mass, draft_row, drafted, num_splits, temperature, SPLITS
            )
            y = load_dense_draft(
                draft.logits + draft_row * draft.logits_stride, draft.column_of, token, drafted & known
            )
            q = probability(y, draft_top, draft_mass, temperature, USE_FP64)
        else:
            draft_top = tl.load(scratch.draft_top + draft_row, mask=drafted, other=0.0, cache_modifier=".cg")
            draft_mass = tl.load(scratch.draft_mass + draft_row, mask=drafted, other=1.0, cache_modifier=".cg")
            token_mass = tl.load(scratch.draft_token_mass + draft_row, mask=drafted, other=0.0, cache_modifier=".cg")
            q = token_mass / draft_mass
        ended |= ~(q > 0)
    else:
        draft_top, draft_mass = top, mass
        q = tl.full([ROWS], 1.0, tl.float32)
    position = tl.load(batch.position + request)
    uniform = accept_uniform(tl.load(batch.accept + request), position + offset, offset, USE_FP64)
    return Rows(offset, exists, drafted, token, top, mass, draft_top, draft_mass, p, q, ended, uniform)


@triton.jit
def draw(
    batch,
    draft,
    scratch,
    request,
    temperature,
    rows,
    place,
    wants_residual,
    HAS_DRAFT_LOGITS: tl.constexpr,
    EXCLUDES_DRAFT: tl.constexpr,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Score and token of the draw from row `place` of the request: from the residual of its draft, or from p."""
    first_row, first_draft, _ = request_rows(batch, request)
    row = first_row + place
    top = at(rows.top, rows.offset, place)
    state = row_state(tl.load(batch.resample + request), tl.load(batch.position + request) + place, place * 0)
    logits = batch.logits + row * batch.logits_stride
    group = row * scratch.num_groups
    bound = lane_bounds(
        scratch.group_top + group,
        scratch.lane_floor + group * LANES,
        scratch.num_groups,
        top,
        temperature,
        GROUPS,
        LANES,
    )
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    if HAS_DRAFT_LOGITS:
        if wants_residual:
            mass = at(rows.mass, rows.offset, place)
            log_bound = bound - tl.log(mass).to(tl.float32)
            draft_top = at(rows.draft_top, rows.offset, place)
            draft_mass = at(rows.draft_mass, rows.offset, place)
            draft_logits = draft.logits + (first_draft + place) * draft.logits_stride
            if draft.token_ids is None:
                best, winner = race_of_residual(
                    logits, batch.vocab, draft_logits, draft.column_of, temperature, top, mass, draft_top, draft_mass,
                    1.0, state, log_bound, USE_FP64, GROUP, GROUPS, LINE, LANES,
                )  # fmt: skip
            else:
                ids = draft.token_ids + (first_draft + place) * draft.token_ids_stride
                best, winner = race_of_sparse_residual(
                    logits, batch.vocab, draft_logits, ids, draft.width, temperature, top, mass, draft_top, draft_mass,
                    compute_type(tl.full([], 1.0, tl.float32), USE_FP64), state, log_bound, USE_FP64, GROUP, GROUPS,
                    LINE, LANES, LIST, LISTS,
                )  # fmt: skip
        else:
            best, winner = race_of_target(
                logits, None, batch.vocab, temperature, top, state, -1, bound, USE_FP64, GROUP, GROUPS, LINE, LANES
            )
    else:
        excluded = tl.full([], -1, tl.int64)
        if EXCLUDES_DRAFT:
            excluded = tl.where(wants_residual, at(rows.token, rows.offset, place), excluded)
        best, winner = race_of_target(
            logits, None, batch.vocab, temperature, top, state, excluded, bound, USE_FP64, GROUP, GROUPS, LINE, LANES
        )
    return best, winner


@triton.jit
def resolve(
    batch,
    draft,
    scratch,
    request,
    temperature,
    rows,
    refused,  # [ROWS]: the draft is not accepted
    accepted,  # number of accepted drafts to start from
    end,  # rows from here on belong to later waves
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Draws the token after the accepted drafts; returns both, and whether the wave has decided (else every draft of
    it is accepted).

    A residual without float mass counts as acceptance (for "synthetic": p stands in), so the draw may move on.
    "coupled" draws in every row and moves on while the draw equals the draft.
    """
    _, _, num_drafts = request_rows(batch, request)
    token = tl.full([], -1, tl.int32)
    decided = accepted < 0
    is_plain = accepted < 0
    is_open = accepted < end
    while is_open:
        is_valid = at(rows.top, rows.offset, accepted) > -INFINITY
        is_draft = accepted < num_drafts
        wants_residual = is_draft & (at(rows.ended.to(tl.int32), rows.offset, accepted) == 0) & (is_plain == 0)
        score = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
        token = tl.full([], -1, tl.int32)
        if is_valid:
            score, token = draw(
                batch, draft, scratch, request, temperature, rows, accepted, wants_residual, HAS_DRAFT_LOGITS,
                METHOD != "coupled", USE_FP64, GROUP, GROUPS, LINE, LANES, LIST, LISTS,
            )  # fmt: skip
        if METHOD == "coupled":
            moves = is_valid & is_draft & (token == at(rows.token, rows.offset, accepted))
            accepted += moves.to(tl.int32)
            is_open = moves & (accepted < end)
            decided = moves == 0
        else:
            is_empty = is_valid & wants_residual & (score == -INFINITY)
            decided = is_empty == 0
            if METHOD == "synthetic":
                is_plain = is_empty
                is_open = is_empty
            else:
                following = tl.min(tl.where(refused & (rows.offset > accepted), rows.offset, NO_INDEX), 0)
                accepted = tl.where(is_empty, tl.minimum(following, num_drafts), accepted)
                is_open = is_empty & (accepted < end)
    return accepted, token, decided
