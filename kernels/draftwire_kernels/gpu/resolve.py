"""From the statistics of a request's rows to its emitted tokens."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at, request_rows
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.race import (
    compute_type,
    lane_bounds,
    load_groups,
    probability,
    race_of_list,
    race_of_residual,
    race_of_target,
    race_of_unlisted,
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


class Drafted(NamedTuple):
    """What is known of the drafts of a wave without its masses, vectors [ROWS]."""

    offset: Any  # place of the row in the request
    exists: Any
    drafted: Any  # the row verifies a draft
    token: Any  # that draft
    known: Any  # it is a token of the vocabulary
    logit: Any  # of the target
    draft_logit: Any  # of dense draft logits; else as `logit`


class Parts(NamedTuple):
    """Maxima and masses as the programs of a wave have left them: [ROWS, SPLITS]; of lists of draft logits [ROWS]."""

    top: Any
    mass: Any
    draft_top: Any
    draft_mass: Any
    draft_token_mass: Any


@triton.jit
def load_tokens(batch, first_draft, num_drafts, begin, count, ROWS: tl.constexpr):
    """Drafts of the rows begin .. begin + count - 1 of a request, -1 for none."""
    place = tl.arange(0, ROWS)
    drafted = (place < count) & (begin + place < num_drafts)
    return tl.load(batch.draft_tokens + first_draft + begin + place, mask=drafted, other=-1)


@triton.jit
def load_drafted(
    batch,
    draft,
    first_row,
    first_draft,
    num_drafts,
    begin,
    count,
    token,
    HAS_DRAFT_LOGITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Logits of the drafts `token` of the rows begin .. begin + count - 1 of a request."""
    place = tl.arange(0, ROWS)
    offset = begin + place
    exists = (place < count) & (offset <= num_drafts)
    drafted = exists & (offset < num_drafts)
    known = (token >= 0) & (token < batch.vocab)
    logit = load_logits(batch.logits + (first_row + offset) * batch.logits_stride + token, drafted & known)
    draft_logit = logit
    if HAS_DRAFT_LOGITS and draft.token_ids is None:
        draft_logit = load_dense_draft(
            draft.logits + (first_draft + offset) * draft.logits_stride, draft.column_of, token, drafted & known
        )
    return Drafted(offset, exists, drafted, token, known, logit, draft_logit)


@triton.jit
def _load_parts(top_ptr, mass_ptr, row, exists, num_splits, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)[None, :]
    index = row[:, None] * num_splits + split
    mask = exists[:, None] & (split < num_splits)
    top = tl.load(top_ptr + index, mask=mask, other=-INFINITY, cache_modifier=".cg")
    return top, tl.load(mass_ptr + index, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def load_parts(
    draft, scratch, first_row, first_draft, drafted, HAS_DRAFT_LOGITS: tl.constexpr, SPLITS: tl.constexpr
):
    """What the programs of a wave have left of its rows."""
    row = first_row + drafted.offset
    num_splits = scratch.num_splits
    top, mass = _load_parts(scratch.part_top, scratch.part_mass, row, drafted.exists, num_splits, SPLITS)
    draft_top, draft_mass, draft_token_mass = top, mass, mass
    if HAS_DRAFT_LOGITS:
        row = first_draft + drafted.offset
        if draft.token_ids is None:
            draft_top, draft_mass = _load_parts(
                scratch.draft_top, scratch.draft_mass, row, drafted.drafted, num_splits, SPLITS
            )
        else:
            draft_top = tl.load(scratch.draft_top + row, mask=drafted.drafted, other=0.0, cache_modifier=".cg")
            draft_mass = tl.load(scratch.draft_mass + row, mask=drafted.drafted, other=1.0, cache_modifier=".cg")
            draft_token_mass = tl.load(
                scratch.draft_token_mass + row, mask=drafted.drafted, other=0.0, cache_modifier=".cg"
            )
    return Parts(top, mass, draft_top, draft_mass, draft_token_mass)


@triton.jit
def _combined(part_top, part_mass, temperature):
    """Maximum and mass [ROWS] of rows from those of their parts [ROWS, SPLITS]."""
    top = maximum_or_nan(part_top, 1)
    return top, tl.sum(part_mass * exponents(part_top, top[:, None], temperature), 1)


@triton.jit
def combine_rows(
    batch,
    draft,
    request,
    drafted,
    parts,
    temperature,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Statistics of the rows of a wave at a temperature above 0."""
    offset = drafted.offset
    top, mass = _combined(parts.top, parts.mass, temperature)
    p = probability(drafted.logit, tl.where(top == -INFINITY, 0.0, top), mass, temperature, USE_FP64)
    ended = ~drafted.known
    if HAS_DRAFT_LOGITS:
        if draft.token_ids is None:
            draft_top, draft_mass = _combined(parts.draft_top, parts.draft_mass, temperature)
            q = probability(drafted.draft_logit, draft_top, draft_mass, temperature, USE_FP64)
        else:
            draft_top, draft_mass = parts.draft_top, parts.draft_mass
            q = parts.draft_token_mass / draft_mass
        ended |= ~(q > 0)
    else:
        draft_top, draft_mass = top, mass
        q = tl.full([ROWS], 1.0, tl.float32)
    position = tl.load(batch.position + request)
    uniform = accept_uniform(tl.load(batch.accept + request), position + offset, offset, USE_FP64)
    return Rows(
        offset, drafted.exists, drafted.drafted, drafted.token, top, mass, draft_top, draft_mass, p, q, ended, uniform
    )


@triton.jit
def load_row_groups(scratch, row, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """What the scan left of a row's groups."""
    group = row * scratch.num_groups
    return load_groups(
        scratch.group_top + group, scratch.lane_floor + group * LANES, scratch.num_groups, GROUPS, LANES
    )


@triton.jit
def draw(
    batch,
    draft,
    scratch,
    request,
    temperature,
    rows,
    groups,
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
    """Score and token of the draw from row `place` of the request: from the residual of its draft, or from p. `groups`
    is what the scan left of that row, or None where it is still to be loaded."""
    first_row, first_draft, _ = request_rows(batch, request)
    row = first_row + place
    top = at(rows.top, rows.offset, place)
    state = row_state(tl.load(batch.resample + request), tl.load(batch.position + request) + place, place * 0)
    logits = batch.logits + row * batch.logits_stride
    if groups is None:
        largest, floor = load_row_groups(scratch, row, GROUPS, LANES)
    else:
        largest, floor = groups
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    if HAS_DRAFT_LOGITS:
        if wants_residual:
            mass = at(rows.mass, rows.offset, place)
            draft_top = at(rows.draft_top, rows.offset, place)
            draft_mass = at(rows.draft_mass, rows.offset, place)
            draft_row = first_draft + place
            if draft.token_ids is None:
                bound = lane_bounds(largest, floor, top, temperature) - tl.log(mass).to(tl.float32)
                draft_logits = draft.logits + draft_row * draft.logits_stride
                best, winner = race_of_residual(
                    logits, batch.vocab, draft_logits, draft.column_of, temperature, top, mass, draft_top, draft_mass,
                    1.0, state, bound, USE_FP64, GROUP, LINE, LANES,
                )  # fmt: skip
            else:
                best, winner = race_of_list(
                    draft, scratch.target_at_ids, draft_row, batch.vocab, temperature, top, mass, draft_top,
                    draft_mass, 1.0, state, USE_FP64, LIST, LISTS,
                )  # fmt: skip
                bound = lane_bounds(largest, floor, top, temperature) - tl.log(mass).to(tl.float32)
                best, winner = race_of_unlisted(
                    logits, draft, draft_row, batch.vocab, temperature, top, mass,
                    compute_type(tl.full([], 1.0, tl.float32), USE_FP64), state, best, winner, bound, USE_FP64, GROUP,
                    LINE, LANES, LIST, LISTS,
                )  # fmt: skip
        else:
            bound = lane_bounds(largest, floor, top, temperature)
            best, winner = race_of_target(
                logits, None, batch.vocab, temperature, top, state, -1, bound, USE_FP64, GROUP, LINE, LANES
            )
    else:
        excluded = tl.full([], -1, tl.int64)
        if EXCLUDES_DRAFT:
            excluded = tl.where(wants_residual, at(rows.token, rows.offset, place), excluded)
        bound = lane_bounds(largest, floor, top, temperature)
        best, winner = race_of_target(
            logits, None, batch.vocab, temperature, top, state, excluded, bound, USE_FP64, GROUP, LINE, LANES
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
    groups,  # of the wave's only row, or None: see `draw`
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
                batch, draft, scratch, request, temperature, rows, groups, accepted, wants_residual, HAS_DRAFT_LOGITS,
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
