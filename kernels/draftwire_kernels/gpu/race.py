"""The exact end of a race whose groups `draftwire_kernels.gpu.scan` has bounded."""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import gumbel_noise
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, load_logits

_MARGIN = tl.constexpr(1e-4)
"""Over the rounding of a bound, in units of a score; so is the next, relative to the size of the score."""
_RELATIVE_MARGIN = tl.constexpr(2e-6)


@triton.jit
def compute_type(x, USE_FP64: tl.constexpr):
    if USE_FP64:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@triton.jit
def scale(x, top, temperature, USE_FP64: tl.constexpr):
    """(x - top) / temperature, at most 0."""
    if USE_FP64:
        return (x.to(tl.float64) - top.to(tl.float64)) / temperature.to(tl.float64)
    else:
        return tl.div_rn(x - top, temperature)


@triton.jit
def probability(x, top, mass, temperature, USE_FP64: tl.constexpr):
    return tl.exp(scale(x, top, temperature, USE_FP64)) / mass


@triton.jit
def group_bounds(group_top, group_floor, num_groups, top, temperature, GROUPS: tl.constexpr):
    """What no score of a group exceeds, (logit - top) / temperature + noise being the score: float32 [GROUPS]."""
    group = tl.arange(0, GROUPS)
    largest = tl.load(group_top + group, mask=group < num_groups, other=-INFINITY, cache_modifier=".cg")
    floor = tl.load(group_floor + group, mask=group < num_groups, other=1.0, cache_modifier=".cg")
    score = (largest - top) / temperature
    bound = score - tl.log(floor) + (_MARGIN - _RELATIVE_MARGIN * score)
    return tl.where(score > -INFINITY, bound, -INFINITY)


@triton.jit
def best_token(score, tokens):
    """The largest score and the lowest token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, tokens, NO_INDEX), 0)


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
):
    """Draws from softmax(logits / temperature): the best score, -inf if nothing runs, and its column."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    highest = tl.max(bound, 0)
    while (highest > -INFINITY) & (highest >= best):
        group = tl.argmax(bound, 0)
        column = group * GROUP + tl.arange(0, GROUP)
        inside = (column < num_columns) & (column != excluded)
        x = load_logits(logits + column, inside)
        ids = column if token_ids is None else tl.load(token_ids + column, mask=inside, other=0)
        score = scale(x, top, temperature, USE_FP64) + gumbel_noise(state, ids.to(tl.uint32), USE_FP64)
        group_best, group_winner = best_token(score, column)
        better = (group_best > best) | ((group_best == best) & (group_winner < winner))
        winner = tl.where(better, group_winner, winner)
        best = tl.maximum(best, group_best)
        bound = tl.where(tl.arange(0, GROUPS) == group, -INFINITY, bound)
        highest = tl.max(bound, 0)
    return best, winner


@triton.jit
def race_of_residual(
    logits,
    num_columns,
    draft_logits,
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
):
    """Draws from max(weight p - q, 0) for dense q. A residual is at most weight p, so the bounds of p hold."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    bound += tl.log(weight).to(tl.float32) - tl.log(mass).to(tl.float32)
    highest = tl.max(bound, 0)
    while (highest > -INFINITY) & (highest >= best):
        group = tl.argmax(bound, 0)
        column = group * GROUP + tl.arange(0, GROUP)
        inside = column < num_columns
        x = load_logits(logits + column, inside)
        y = load_logits(draft_logits + column, inside)
        p = probability(x, top, mass, temperature, USE_FP64)
        residual = p * weight - probability(y, draft_top, draft_mass, temperature, USE_FP64)
        score = tl.log(tl.maximum(residual, 0.0)) + gumbel_noise(state, column.to(tl.uint32), USE_FP64)
        group_best, group_winner = best_token(tl.where(residual > 0, score, -INFINITY), column)
        better = (group_best > best) | ((group_best == best) & (group_winner < winner))
        winner = tl.where(better, group_winner, winner)
        best = tl.maximum(best, group_best)
        bound = tl.where(tl.arange(0, GROUPS) == group, -INFINITY, bound)
        highest = tl.max(bound, 0)
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
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for q on a list of distinct ids.

    First the listed tokens; then the others, group by group. A listed token that leads its group is passed over, and
    its score bounds what is left of the group.
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
    bound = compute_type(bound, USE_FP64) + log_weight
    highest = tl.max(bound, 0)
    while (highest > -INFINITY) & (highest >= best):
        group = tl.argmax(bound, 0)
        column = group * GROUP + tl.arange(0, GROUP)
        x = load_logits(logits + column, column < num_columns)
        score = scale(x, top, temperature, USE_FP64) + log_weight
        score += gumbel_noise(state, column.to(tl.uint32), USE_FP64)
        group_best, group_winner = best_token(tl.where(score < highest, score, -INFINITY), column)
        matches = tl.zeros([LIST], tl.int32)
        for turn in range(LISTS):
            place = turn * LIST + tl.arange(0, LIST)
            token = tl.load(draft_ids + place, mask=place < draft_width, other=-1)
            matches += (token == group_winner).to(tl.int32)
        is_listed = tl.sum(matches, 0) > 0
        better = (group_best > best) & (is_listed == 0)
        winner = tl.where(better, group_winner, winner)
        best = tl.where(better, group_best, best)
        rest = tl.where(is_listed, group_best, -INFINITY)
        bound = tl.where(tl.arange(0, GROUPS) == group, rest, bound)
        highest = tl.max(bound, 0)
    return best, winner
