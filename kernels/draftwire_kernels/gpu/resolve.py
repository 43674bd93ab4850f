"""Computes a request's emitted tokens from the statistics of its rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at, request_rows
from draftwire_kernels.gpu.draw import (
    LEAD,
    draw_residual,
    draw_residual_of_list,
    draw_without,
    group_bounds,
    less_token,
    load_lists,
    load_rows,
    with_target,
)
from draftwire_kernels.gpu.noise import accept_uniform, row_state
from draftwire_kernels.gpu.race import compute_type, load_groups, probability, race_bounds, race_of_target
from draftwire_kernels.gpu.scan import INFINITY, exponents, load_dense_draft, load_logits, maximum_or_nan


class Rows(NamedTuple):
    """Statistics of up to ROWS consecutive rows of one request, vectors [ROWS] in registers."""

    offset: Any  # index of the row in the request
    exists: Any
    drafted: Any  # the row verifies a draft
    token: Any  # the draft
    logit: Any  # of the target
    top: Any
    mass: Any
    draft_top: Any
    draft_mass: Any
    p: Any  # of the draft
    q: Any
    ended: Any  # the draft is outside of its q's support, which ends the drafts
    uniform: Any


class Drafted(NamedTuple):
    """The drafts of a wave, vectors [ROWS]."""

    offset: Any  # index of the row in the request
    exists: Any
    drafted: Any  # the row verifies a draft
    token: Any  # the draft
    known: Any  # the draft is a token of the vocabulary
    logit: Any  # of the target
    draft_logit: Any  # of dense draft logits; else `logit`


class Parts(NamedTuple):
    """Results of a wave's programs for its rows."""

    top: Any  # [ROWS, GROUPS], for block verification [ROWS, PARTS]
    mass: Any
    draft_top: Any  # [ROWS, PARTS], of dense draft logits; else `top`
    draft_mass: Any


@triton.jit
def load_tokens(batch, first_draft, num_drafts, begin, count, ROWS: tl.constexpr):
    """Return the drafts of the rows begin .. begin + count - 1 of a request, -1 for none."""
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
    """Return the logits of the drafts `token` of the rows begin .. begin + count - 1 of a request."""
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
def load_parts(
    draft,
    scratch,
    first_row,
    first_draft,
    drafted,
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = first_row + drafted.offset
    if METHOD == "block":
        top, mass = load_rows(scratch.part_top, scratch.part_mass, row, drafted.exists, PARTS, PARTS)
    else:
        top, mass = load_rows(scratch.group_top, scratch.group_mass, row, drafted.exists, scratch.num_groups, GROUPS)
    draft_top, draft_mass = top, mass
    if HAS_DRAFT_LOGITS and draft.token_ids is None:
        row = first_draft + drafted.offset
        draft_top, draft_mass = load_rows(scratch.draft_top, scratch.draft_mass, row, drafted.drafted, PARTS, PARTS)
    return Parts(top, mass, draft_top, draft_mass)


@triton.jit
def _combined(part_top, part_mass, temperature, USE_FP64: tl.constexpr):
    """Return maximum and mass [ROWS] of rows from those of their parts [ROWS, PARTS]."""
    top = maximum_or_nan(part_top, 1)
    return top, tl.sum(compute_type(part_mass, USE_FP64) * exponents(part_top, top[:, None], temperature), 1)


@triton.jit
def _sums(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _of_lists(
    draft,
    drafted,
    first_draft,
    ids,
    logits,
    temperature,
    USE_FP64: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Return largest logit, mass and mass of the draft [ROWS] of rows with lists of draft logits; `ids` and `logits`
    are the first pieces."""
    token = drafted.token[:, None]
    top = maximum_or_nan(logits, 1)
    part = exponents(logits, top[:, None], temperature).to(tl.float64 if USE_FP64 else tl.float32)
    mass, token_mass = tl.reduce((part, tl.where(ids == token, part, 0.0)), 1, _sums)
    for turn in range(1, LISTS):
        ids, logits = load_lists(draft, first_draft + drafted.offset, drafted.drafted, turn, LIST)
        both = tl.maximum(top, maximum_or_nan(logits, 1), propagate_nan=tl.PropagateNan.ALL)
        part = exponents(logits, both[:, None], temperature).to(mass.dtype)
        kept = exponents(top, both, temperature)
        more, token_more = tl.reduce((part, tl.where(ids == token, part, 0.0)), 1, _sums)
        mass, token_mass = mass * kept + more, token_mass * kept + token_more
        top = both
    return top, mass, token_mass


@triton.jit
def combine_rows(
    draft,
    first_draft,
    drafted,
    parts,
    lists,  # first pieces of the rows' lists, or None
    temperature,
    accept,  # key of the request's uniforms
    position,  # of its first row
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    ROWS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Return the statistics of the rows of a wave at a temperature above 0."""
    offset = drafted.offset
    draft_top, draft_mass, token_mass = drafted.logit, parts.mass, parts.mass
    if lists is not None:  # first, while the parts are being loaded
        draft_top, draft_mass, token_mass = _of_lists(
            draft, drafted, first_draft, lists[0], lists[1], temperature, USE_FP64, LIST, LISTS
        )
    top, mass = _combined(parts.top, parts.mass, temperature, USE_FP64)
    p = probability(drafted.logit, tl.where(top == -INFINITY, 0.0, top), mass, temperature, USE_FP64)
    ended = ~drafted.known
    if lists is not None:
        q = token_mass / draft_mass
        ended |= ~(q > 0)
    elif HAS_DRAFT_LOGITS:
        draft_top, draft_mass = _combined(parts.draft_top, parts.draft_mass, temperature, USE_FP64)
        q = probability(drafted.draft_logit, draft_top, draft_mass, temperature, USE_FP64)
        ended |= ~(q > 0)
    else:
        draft_top, draft_mass = top, mass
        q = tl.full([ROWS], 1.0, tl.float32)
    uniform = accept_uniform(accept, position + offset, offset, USE_FP64)
    return Rows(
        offset, drafted.exists, drafted.drafted, drafted.token, drafted.logit, top, mass, draft_top, draft_mass, p, q,
        ended, uniform,
    )  # fmt: skip


@triton.jit
def row_piece(batch, row, lists, LIST: tl.constexpr):
    """Return the first piece of a row's list from `load_lists` of only this row."""
    logits = batch.logits + row * batch.logits_stride
    return with_target(logits, tl.reshape(lists[0], [LIST]), tl.reshape(lists[1], [LIST]), batch.vocab)


@triton.jit
def draw(
    batch,
    draft,
    scratch,
    request,
    temperature,
    key,
    position,
    rows,
    groups,
    piece,
    place,
    wants_residual,
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Sample from row `place` of the request, from the residual of its draft or from p; return score and token.

    `groups` are the scan's results for the row, `piece` is the first piece of its list; None to load them.
    """
    first_row, first_draft, _ = request_rows(batch, request)
    row = first_row + place
    top = at(rows.top, rows.offset, place)
    state = row_state(key, position + place, place * 0)
    logits = batch.logits + row * batch.logits_stride
    if groups is None:
        begin = row * scratch.num_groups
        largest, mass_or_lead = load_groups(
            scratch.group_top + begin, scratch.group_mass + begin, scratch.num_groups, GROUPS
        )
    else:
        largest, mass_or_lead = groups
    score = compute_type(tl.full([], 0.0, tl.float32), USE_FP64)
    if METHOD == "coupled":
        bound = race_bounds(largest, mass_or_lead, top, temperature)
        token = race_of_target(logits, None, batch.vocab, temperature, top, state, bound, USE_FP64, GROUP)
    else:
        drafted = tl.where(wants_residual, at(rows.token, rows.offset, place), -1)
        if HAS_DRAFT_LOGITS == 0 or LISTS > 0:
            own = tl.where(drafted < 0, -1, drafted // GROUP)
            group_top = tl.max(tl.where(tl.arange(0, GROUPS) == own, largest, -INFINITY), 0)
            gone = exponents(at(rows.logit, rows.offset, place), group_top, temperature)
            p, q = at(rows.p, rows.offset, place), at(rows.q, rows.offset, place)
            mass_or_lead = less_token(mass_or_lead, own, tl.where(p > q, q / p, 1.0).to(tl.float32) * gone)
        bound = group_bounds(largest, mass_or_lead, top, temperature, state)
        if HAS_DRAFT_LOGITS:
            one = compute_type(tl.full([], 1.0, tl.float32), USE_FP64)
            mass = at(rows.mass, rows.offset, place)
            bound -= tl.log(mass).to(tl.float32)
            draft_top = tl.where(wants_residual, at(rows.draft_top, rows.offset, place), 0.0)
            q_share = tl.where(wants_residual, one / at(rows.draft_mass, rows.offset, place), 0.0)
            draft_row = first_draft + place
            if LISTS > 0:
                score, token = draw_residual_of_list(
                    logits, draft, draft_row, piece, batch.vocab, temperature, top, one / mass, draft_top, q_share,
                    state, bound, USE_FP64, GROUP, LIST, LISTS,
                )  # fmt: skip
            else:
                score, token = draw_residual(
                    logits, batch.vocab, draft.logits + draft_row * draft.logits_stride, draft.column_of, temperature,
                    top, one / mass, draft_top, q_share, state, bound, USE_FP64, GROUP, LEAD,
                )  # fmt: skip
        else:
            score, token = draw_without(logits, batch.vocab, temperature, top, drafted, state, bound, USE_FP64, GROUP)
    return score, token


@triton.jit
def resolve(
    batch,
    draft,
    scratch,
    request,
    temperature,
    key,  # of the request's RESAMPLE stream
    position,  # of its first row
    rows,
    groups,  # of the wave's only row, or None, see `draw`
    piece,  # the same
    accepted,  # accepted drafts so far
    end,  # the next wave's first row
    METHOD: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Sample the token after the accepted drafts; return the number of accepted drafts, the token, and whether the wave
    has decided (otherwise all of its drafts are accepted).

    p replaces a residual without mass in floating point. "coupled" samples in every row and continues while the token
    equals the draft.
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
                batch, draft, scratch, request, temperature, key, position, rows, groups, piece, accepted,
                wants_residual, METHOD, HAS_DRAFT_LOGITS, USE_FP64, GROUP, GROUPS, LIST, LISTS,
            )  # fmt: skip
        if METHOD == "coupled":
            moves = is_valid & is_draft & (token == at(rows.token, rows.offset, accepted))
            accepted += moves.to(tl.int32)
            is_open = moves & (accepted < end)
            decided = moves == 0
        else:
            decided = accepted >= 0
            is_plain = is_valid & wants_residual & (score == -INFINITY)
            is_open = is_plain
    return accepted, token, decided
