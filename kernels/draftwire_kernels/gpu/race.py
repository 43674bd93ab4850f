"""The exact end of a race that `draftwire_kernels.gpu.scan` has bounded.

Every turn takes, for each of the LANES lanes, the group where it is bounded highest, and bounds each of the lane's
tokens there. Of these, one after another, those that may still win are looked at exactly, one or two as a rule; the
race ends when no bound is left above the best score.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import gumbel_noise, log_floor, log_lead, token_words, uniform_floor
from draftwire_kernels.gpu.scan import INFINITY, LOG2_E, MAX_FLOAT, NO_INDEX, load_dense_draft, load_logits, residuals

_MARGIN = tl.constexpr(1e-4)  # over the rounding of a bound, in units of a score
_RELATIVE_MARGIN = tl.constexpr(2e-6)  # likewise, relative to the size of the score


@triton.jit
def compute_type(x, USE_FP64: tl.constexpr):
    # One return only: a branch on a constant that returns does not end the function for Triton's compiler.
    return x.to(tl.float64 if USE_FP64 else tl.float32)


@triton.jit
def scale(x, top, temperature, USE_FP64: tl.constexpr):
    """(x - top) / temperature, at most 0."""
    if USE_FP64:
        scaled = (x.to(tl.float64) - top.to(tl.float64)) / temperature.to(tl.float64)
    else:
        scaled = tl.div_rn(x - top, temperature)
    return scaled


@triton.jit
def probability(x, top, mass, temperature, USE_FP64: tl.constexpr):
    return tl.exp(scale(x, top, temperature, USE_FP64)) / mass


@triton.jit
def load_groups(group_top, lane_lead, num_groups, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """What `scan_sampled` left of a row: [GROUPS] and [GROUPS, LANES]."""
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    largest = tl.load(group_top + group, mask=exists, other=-INFINITY, cache_modifier=".cg")
    lane = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return largest, tl.load(lane_lead + lane, mask=exists[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def lane_bounds(largest, lead, top, temperature):
    """What no score (logit - top) / temperature + noise of a lane of a group exceeds: [GROUPS, LANES]."""
    score = (largest - top) / temperature
    bound = (score * (1.0 - _RELATIVE_MARGIN) + _MARGIN)[:, None] + 2.0 * log_lead(lead)
    return tl.where((score > -INFINITY)[:, None], bound, -INFINITY)


@triton.jit
def residual_bounds(group_floor, num_groups, GROUPS: tl.constexpr):
    """What no log residual + noise of a group exceeds: [GROUPS, 1], from what `scan_residual` left."""
    group = tl.arange(0, GROUPS)
    floor = tl.load(group_floor + group, mask=group < num_groups, other=INFINITY, cache_modifier=".cg")
    return (-log_floor(floor) + _MARGIN)[:, None]


@triton.jit
def _in_order(bits):
    """An int32 that is ordered as the float32 of these bits, and back."""
    return bits ^ ((bits >> 31) & NO_INDEX)


@triton.jit
def _packed(bound, index, SIZE: tl.constexpr):
    """An int32 that is ordered as the bounds, whose last bits are rounded up to make room for an index below SIZE (a
    power of two): one reduction finds the highest bound and where it is."""
    return (_in_order(bound.to(tl.int32, bitcast=True)) | (SIZE - 1)) ^ index


@triton.jit
def _unpacked(packed, SIZE: tl.constexpr):
    """The bound, rounded up, and the index."""
    return _in_order(packed | (SIZE - 1)).to(tl.float32, bitcast=True), (packed & (SIZE - 1)) ^ (SIZE - 1)


@triton.jit
def leaders(bound):
    """Of each lane the highest bound and the group that has it, packed [LANES], and the highest of all."""
    GROUPS: tl.constexpr = bound.shape[0]
    leading = tl.max(_packed(bound, tl.arange(0, GROUPS)[:, None], GROUPS), 0)
    return leading, _unpacked(tl.max(leading, 0), GROUPS)[0]


@triton.jit
def without(bound, groups):
    """The bounds that are left when each lane's group has been looked at."""
    return tl.where(tl.arange(0, bound.shape[0])[:, None] == groups[None, :], -INFINITY, bound)


@triton.jit
def _columns(lane, place, group, GROUP: tl.constexpr, LINE: tl.constexpr, LANES: tl.constexpr):
    RUN: tl.constexpr = LINE // 32  # neighbouring tokens of a thread
    return group * GROUP + (place // RUN * LANES + lane) * RUN + place % RUN


@triton.jit
def lane_columns(groups, GROUP: tl.constexpr, LINE: tl.constexpr, LANES: tl.constexpr):
    """The columns of each lane in its group: [LANES, GROUP // LANES]."""
    place = tl.arange(0, GROUP // LANES)[None, :]
    return _columns(tl.arange(0, LANES)[:, None], place, groups[:, None], GROUP, LINE, LANES)


@triton.jit
def candidate_of(ceiling, groups, GROUP: tl.constexpr, LINE: tl.constexpr, LANES: tl.constexpr):
    """The highest ceiling [LANES, GROUP // LANES], rounded up, and the column that has it."""
    lanes = tl.arange(0, LANES)
    place = tl.arange(0, GROUP // LANES)[None, :]
    highest, index = _unpacked(tl.max(_packed(ceiling, lanes[:, None] * (GROUP // LANES) + place, GROUP)), GROUP)
    lane = index // (GROUP // LANES)
    group = tl.sum(tl.where(lanes == lane, groups, 0), 0)
    return highest, _columns(lane, index % (GROUP // LANES), group, GROUP, LINE, LANES)


@triton.jit
def ahead(best, winner, score, token):
    """The better of two tokens, the lower id where their scores are equal."""
    is_better = (score > best) | ((score == best) & (token < winner))
    return tl.where(is_better, score, best), tl.where(is_better, token, winner)


@triton.jit
def target_ceiling(x, top, temperature, floor):
    """What no (x - top) / temperature + noise exceeds."""
    return (x - top) / temperature * (1.0 - _RELATIVE_MARGIN) + (_MARGIN - log_floor(floor))


@triton.jit
def race_of_target(
    logits,
    token_ids,
    num_columns,
    temperature,
    top,
    state,
    excluded,  # this column does not run; -1 for none
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draws from softmax(logits / temperature): the best score, -inf if nothing runs, and its column."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    leading, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, groups = _unpacked(leading, bound.shape[0])
        column = lane_columns(groups, GROUP, LINE, LANES)
        runs = (column < num_columns) & (column != excluded) & (bounds >= best)[:, None]
        x = load_logits(logits + column, runs)
        ids = column if token_ids is None else tl.load(token_ids + column, mask=runs, other=0)
        floor = uniform_floor(token_words(state, ids.to(tl.uint32)))
        ceiling = tl.where(x > -INFINITY, target_ceiling(x, top, temperature, floor), -INFINITY)
        candidate, token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        while (candidate > -INFINITY) & (candidate >= best):
            score = scale(load_logits(logits + token, True), top, temperature, USE_FP64)
            id = token if token_ids is None else tl.load(token_ids + token)
            score += gumbel_noise(state, id.to(tl.uint32), USE_FP64)
            best, winner = ahead(best, winner, score, token)
            ceiling = tl.where(column == token, -INFINITY, ceiling)
            candidate, token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        bound = without(bound, groups)
        leading, highest = leaders(bound)
    return best, winner


@triton.jit
def race_of_residual(
    logits,
    num_columns,
    draft_logits,
    column_of,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,
    weight,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for dense q; `bound` is one of log residual + noise, by p alone."""
    inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
    p_share, q_share = (weight / mass).to(tl.float32), (1.0 / draft_mass).to(tl.float32)
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    leading, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, groups = _unpacked(leading, bound.shape[0])
        column = lane_columns(groups, GROUP, LINE, LANES)
        runs = (column < num_columns) & (bounds >= best)[:, None]
        x = load_logits(logits + column, runs)
        y = load_dense_draft(draft_logits, column_of, column, runs)
        _, above = residuals((x - top) * inverse, p_share, (y - draft_top) * inverse, q_share)
        floor = uniform_floor(token_words(state, column.to(tl.uint32)))
        ceiling = tl.where(above > 0, tl.log(above) - log_floor(floor) + _MARGIN, -INFINITY)
        candidate, token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        while (candidate > -INFINITY) & (candidate >= best):
            x_token = load_logits(logits + token, True)
            y_token = load_dense_draft(draft_logits, column_of, token, True)
            residual = probability(x_token, top, mass, temperature, USE_FP64) * weight
            residual -= probability(y_token, draft_top, draft_mass, temperature, USE_FP64)
            score = tl.log(tl.maximum(residual, 0.0)) + gumbel_noise(state, token.to(tl.uint32), USE_FP64)
            best, winner = ahead(best, winner, tl.where(residual > 0, score, -INFINITY), token)
            ceiling = tl.where(column == token, -INFINITY, ceiling)
            candidate, token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        bound = without(bound, groups)
        leading, highest = leaders(bound)
    return best, tl.where(best > -INFINITY, winner, NO_INDEX)


@triton.jit
def load_lists(draft, draft_row, drafted, turn, LIST: tl.constexpr):
    """The turn-th piece of the lists of rows [ROWS]: target ids, -1 for none, and draft logits, both [ROWS, LIST]."""
    place = turn * LIST + tl.arange(0, LIST)[None, :]
    listed = drafted[:, None] & (place < draft.width)
    ids = draft.token_ids + draft_row[:, None] * draft.token_ids_stride + place
    y = load_logits(draft.logits + draft_row[:, None] * draft.logits_stride + place, listed)
    return tl.load(ids, mask=listed, other=-1), y


@triton.jit
def with_target(logits, ids, y, num_columns):
    """A piece of one row's list: which of its places count, their ids, the logits of target and draft: [LIST]."""
    listed = (ids >= 0) & (ids < num_columns)
    return listed, ids.to(tl.int32), load_logits(logits + ids, listed), y


@triton.jit
def load_piece(logits, draft, draft_row, num_columns, turn, LIST: tl.constexpr):
    """The turn-th piece of a row's list, as `with_target` has it."""
    place = turn * LIST + tl.arange(0, LIST)
    ids = tl.load(draft.token_ids + draft_row * draft.token_ids_stride + place, mask=place < draft.width, other=-1)
    y = load_logits(draft.logits + draft_row * draft.logits_stride + place, place < draft.width)
    return with_target(logits, ids, y, num_columns)


@triton.jit
def race_of_piece(piece, temperature, top, mass, draft_top, draft_mass, weight, state, USE_FP64: tl.constexpr):
    """Draws from max(weight p - q, 0) among the ids of a piece of a list."""
    listed, token, x, y = piece
    p = probability(x, top, mass, temperature, USE_FP64)
    residual = p * weight - probability(y, draft_top, draft_mass, temperature, USE_FP64)
    score = tl.log(tl.maximum(residual, 0.0)) + gumbel_noise(state, token.to(tl.uint32), USE_FP64)
    return tl.reduce((tl.where(listed & (residual > 0), score, -INFINITY), token), 0, ahead)


@triton.jit
def race_of_list(
    logits,
    draft,
    draft_row,
    first,  # the first piece of the row's list, or None where it is still to be loaded
    num_columns,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,
    weight,
    state,
    USE_FP64: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Draws from max(weight p - q, 0) among the distinct ids on which q lies."""
    piece = load_piece(logits, draft, draft_row, num_columns, 0, LIST) if first is None else first
    best, winner = race_of_piece(piece, temperature, top, mass, draft_top, draft_mass, weight, state, USE_FP64)
    for turn in range(1, LISTS):
        piece = load_piece(logits, draft, draft_row, num_columns, turn, LIST)
        score, token = race_of_piece(piece, temperature, top, mass, draft_top, draft_mass, weight, state, USE_FP64)
        best, winner = ahead(best, winner, score, token)
    return best, winner


@triton.jit
def race_of_unlisted(
    logits,
    draft,
    draft_row,
    num_columns,
    temperature,
    top,
    mass,
    weight,
    state,
    best,  # what `race_of_list` has found
    winner,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Goes on with the tokens outside the list, where the residual is weight p; `bound` is one of log (weight p) +
    noise. Those that may win are looked up in the list."""
    draft_ids = draft.token_ids + draft_row * draft.token_ids_stride
    log_weight = tl.log(weight) - tl.log(mass)
    leading, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, groups = _unpacked(leading, bound.shape[0])
        column = lane_columns(groups, GROUP, LINE, LANES)
        x = load_logits(logits + column, (column < num_columns) & (bounds >= best)[:, None])
        floor = uniform_floor(token_words(state, column.to(tl.uint32)))
        ceiling = target_ceiling(x, top, temperature, floor) + log_weight.to(tl.float32) + _MARGIN
        ceiling = tl.where(x > -INFINITY, ceiling, -INFINITY)
        candidate, candidate_token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        while (candidate > -INFINITY) & (candidate >= best):
            is_listed = tl.full([], 0, tl.int32)
            for turn in range(LISTS):
                place = turn * LIST + tl.arange(0, LIST)
                token = tl.load(draft_ids + place, mask=place < draft.width, other=-1)
                is_listed += tl.sum((token == candidate_token).to(tl.int32), 0)
            score = scale(load_logits(logits + candidate_token, True), top, temperature, USE_FP64) + log_weight
            score += gumbel_noise(state, candidate_token.to(tl.uint32), USE_FP64)
            best, winner = ahead(best, winner, tl.where(is_listed == 0, score, -INFINITY), candidate_token)
            ceiling = tl.where(column == candidate_token, -INFINITY, ceiling)
            candidate, candidate_token = candidate_of(ceiling, groups, GROUP, LINE, LANES)
        bound = without(bound, groups)
        leading, highest = leaders(bound)
    return best, tl.where(best > -INFINITY, winner, NO_INDEX)
