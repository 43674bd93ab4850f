"""The exact end of a race that `draftwire_kernels.gpu.scan` has bounded.

Every turn takes, for each of the LANES lanes, the group where it is bounded highest, and looks at the lane's tokens
there exactly; the race ends when no bound is left above the best score.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import gumbel_noise
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, load_dense_draft, load_logits

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
def lane_bounds(group_top, lane_floor, num_groups, top, temperature, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """What no score (logit - top) / temperature + noise of a lane of a group exceeds: [GROUPS, LANES]."""
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    largest = tl.load(group_top + group, mask=exists, other=-INFINITY, cache_modifier=".cg")
    lane = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
    floor = tl.load(lane_floor + lane, mask=exists[:, None], other=1.0, cache_modifier=".cg")
    score = (largest - top) / temperature
    bound = (score * (1.0 - _RELATIVE_MARGIN) + _MARGIN)[:, None] - tl.log(floor)
    return tl.where((score > -INFINITY)[:, None], bound, -INFINITY)


@triton.jit
def residual_bounds(group_floor, num_groups, GROUPS: tl.constexpr):
    """What no log residual + noise of a group exceeds: [GROUPS, 1], from what `scan_residual` left."""
    group = tl.arange(0, GROUPS)
    floor = tl.load(group_floor + group, mask=group < num_groups, other=INFINITY, cache_modifier=".cg")
    return (-tl.log(floor) + _MARGIN)[:, None]


@triton.jit
def leaders(bound, GROUP: tl.constexpr, LINE: tl.constexpr, LANES: tl.constexpr):
    """The highest bound of each lane, the group that has it [LANES], and the lane's columns there."""
    RUN: tl.constexpr = LINE // LANES  # neighbouring tokens of a lane
    group = tl.argmax(bound, 0)
    lane = tl.arange(0, LANES)
    token = tl.arange(0, GROUP // LANES)
    within = (token // RUN) * LINE + token % RUN
    column = (group * GROUP + lane * RUN)[:, None] + within[None, :]
    return tl.max(bound, 0), group, column


@triton.jit
def best_token(score, tokens):
    """The largest score and the lowest token that has it."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, tokens, NO_INDEX))


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
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draws from softmax(logits / temperature): the best score, -inf if nothing runs, and its column."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    highest = tl.max(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, group, column = leaders(bound, GROUP, LINE, LANES)
        runs = (column < num_columns) & (column != excluded) & (bounds >= best)[:, None]
        x = load_logits(logits + column, runs)
        ids = column if token_ids is None else tl.load(token_ids + column, mask=runs, other=0)
        score = scale(x, top, temperature, USE_FP64) + gumbel_noise(state, ids.to(tl.uint32), USE_FP64)
        turn_best, turn_winner = best_token(score, column)
        better = (turn_best > best) | ((turn_best == best) & (turn_winner < winner))
        winner = tl.where(better, turn_winner, winner)
        best = tl.maximum(best, turn_best)
        bound = tl.where(tl.arange(0, GROUPS)[:, None] == group[None, :], -INFINITY, bound)
        highest = tl.max(bound)
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
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for dense q; `bound` is one of log residual + noise."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    highest = tl.max(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, group, column = leaders(bound, GROUP, LINE, LANES)
        runs = (column < num_columns) & (bounds >= best)[:, None]
        x = load_logits(logits + column, runs)
        y = load_dense_draft(draft_logits, column_of, column, runs)
        p = probability(x, top, mass, temperature, USE_FP64)
        residual = p * weight - probability(y, draft_top, draft_mass, temperature, USE_FP64)
        score = tl.log(tl.maximum(residual, 0.0)) + gumbel_noise(state, column.to(tl.uint32), USE_FP64)
        turn_best, turn_winner = best_token(tl.where(residual > 0, score, -INFINITY), column)
        better = (turn_best > best) | ((turn_best == best) & (turn_winner < winner))
        winner = tl.where(better, turn_winner, winner)
        best = tl.maximum(best, turn_best)
        bound = tl.where(tl.arange(0, GROUPS)[:, None] == group[None, :], -INFINITY, bound)
        highest = tl.max(bound)
    return best, winner


@triton.jit
def race_of_sparse_residual(
    logits,
    num_columns,
    draft_logits,
    draft_ids,
    draft_width,
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
    GROUPS: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for q on a list of distinct ids; `bound` is one of log (weight p) + noise.

    First the listed tokens run; then the others, of which those that lead their group are looked up in the list.
    """
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    for turn in range(LISTS):
        place = turn * LIST + tl.arange(0, LIST)
        listed = place < draft_width
        token = tl.load(draft_ids + place, mask=listed, other=-1)
        listed &= (token >= 0) & (token < num_columns)
        x = load_logits(logits + token, listed)
        y = load_logits(draft_logits + place, listed)
        p = probability(x, top, mass, temperature, USE_FP64)
        residual = p * weight - probability(y, draft_top, draft_mass, temperature, USE_FP64)
        score = tl.log(tl.maximum(residual, 0.0)) + gumbel_noise(state, token.to(tl.uint32), USE_FP64)
        list_best, list_winner = best_token(tl.where(residual > 0, score, -INFINITY), token.to(tl.int32))
        better = (list_best > best) | ((list_best == best) & (list_winner < winner))
        winner = tl.where(better, list_winner, winner)
        best = tl.maximum(best, list_best)

    log_weight = tl.log(weight) - tl.log(mass)
    bound = compute_type(bound, USE_FP64)
    highest = tl.max(bound)
    while (highest > -INFINITY) & (highest >= best):
        bounds, group, column = leaders(bound, GROUP, LINE, LANES)
        x = load_logits(logits + column, (column < num_columns) & (bounds >= best)[:, None])
        score = scale(x, top, temperature, USE_FP64) + log_weight
        score += gumbel_noise(state, column.to(tl.uint32), USE_FP64)
        group_best, group_winner = best_token(score, column)
        searches = (group_best >= best) & (group_best > -INFINITY)
        while searches:
            is_listed = tl.full([], 0, tl.int32)
            for turn in range(LISTS):
                place = turn * LIST + tl.arange(0, LIST)
                token = tl.load(draft_ids + place, mask=place < draft_width, other=-1)
                is_listed += tl.sum((token == group_winner).to(tl.int32), 0)
            better = (is_listed == 0) & ((group_best > best) | ((group_best == best) & (group_winner < winner)))
            winner = tl.where(better, group_winner, winner)
            best = tl.where(better, group_best, best)
            score = tl.where(column == group_winner, -INFINITY, score)
            group_best, group_winner = best_token(score, column)
            searches = (is_listed > 0) & (group_best >= best) & (group_best > -INFINITY)
        bound = tl.where(tl.arange(0, GROUPS)[:, None] == group[None, :], -INFINITY, bound)
        highest = tl.max(bound)
    return best, winner
