"""A draw in two races (step 6 of `draftwire_kernels.noise`): of the groups by their mass, then of the winner's tokens.

What the scan left of a group bounds its score: the mass of p in it is no less than that of the residual, whatever is
removed from p. Every turn looks at LEAD groups that are bounded high, one of each lane of groups, and finds their mass
exactly; the race of the groups ends when no bound is left above the best score, after one turn as a rule. Then the
tokens of the group that has won run, which that turn has kept.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import group_state, gumbel_ceiling, gumbel_noise, token_words
from draftwire_kernels.gpu.race import (
    MARGIN,
    RELATIVE_MARGIN,
    ahead,
    compute_type,
    packed,
    probability,
    scale,
    unpacked,
)
from draftwire_kernels.gpu.scan import INFINITY, load_dense_draft, load_logits, maximum_or_nan

LEAD = tl.constexpr(4)


@triton.jit
def load_rows(first, second, row, exists, count, COUNT: tl.constexpr):
    """Two numbers of each group or part of rows, the largest logits and the masses: [ROWS, COUNT]."""
    place = tl.arange(0, COUNT)[None, :]
    index = row[:, None] * count + place
    mask = exists[:, None] & (place < count)
    top = tl.load(first + index, mask=mask, other=-INFINITY, cache_modifier=".cg")
    return top, tl.load(second + index, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def with_noise(bound, state):
    """Bounds [GROUPS] of the scores of groups from those of the logarithms of their masses."""
    group = tl.arange(0, bound.shape[0])
    return bound + (MARGIN + gumbel_ceiling(token_words(group_state(state), group.to(tl.uint32))))


@triton.jit
def group_bounds(largest, mass, top, temperature, state):
    """What no group's score exceeds [GROUPS], masses being relative to exp(top / temperature); from what `scan_groups`
    left."""
    score = (largest - top) / temperature
    bound = with_noise(score * (1.0 - RELATIVE_MARGIN) + tl.log(mass), state)
    return tl.where(score > -INFINITY, bound, -INFINITY)


@triton.jit
def residual_bounds(mass, state):
    """The same from what `scan_residual` left."""
    return tl.where(mass > 0, with_noise(tl.log(mass), state), -INFINITY)


@triton.jit
def in_lanes(bound):
    """Bounds [GROUPS] by lanes [GROUPS // LEAD, LEAD]: neighbours lie in different ones."""
    GROUPS: tl.constexpr = bound.shape[0]
    return tl.reshape(bound, [GROUPS // LEAD, LEAD])


@triton.jit
def leaders(bound):
    """Of each lane the highest bound, rounded up, and its place [LEAD], and the highest of all."""
    SIZE: tl.constexpr = bound.shape[0]
    leading = tl.max(packed(bound, tl.arange(0, SIZE)[:, None], SIZE), 0)
    bounds, places = unpacked(leading, SIZE)
    return bounds, places, unpacked(tl.max(leading, 0), SIZE)[0]


@triton.jit
def without(bound, places):
    """The bounds that are left when each lane's group has been looked at."""
    return tl.where(tl.arange(0, bound.shape[0])[:, None] == places[None, :], -INFINITY, bound)


@triton.jit
def group_scores(mass, offset, groups, runs, state, USE_FP64: tl.constexpr):
    """Scores [LEAD] of groups of these masses, times exp(offset)."""
    score = tl.log(mass) + offset + gumbel_noise(group_state(state), groups.to(tl.uint32), USE_FP64)
    return tl.where(runs & (mass > 0), score, -INFINITY)


@triton.jit
def after_turn(best, winner, kept, score, groups, masses):
    """The best score so far, its group and the masses of its tokens [GROUP], after those of LEAD more groups."""
    score, group = tl.reduce((score, groups), 0, ahead)
    is_ahead = (score > best) | ((score == best) & (group < winner))
    kept = tl.where(is_ahead, tl.sum(tl.where((groups == group)[:, None], masses, 0.0), 0), kept)
    return tl.where(is_ahead, score, best), tl.where(is_ahead, group, winner), kept


@triton.jit
def race_of_tokens(masses, winner, state, USE_FP64: tl.constexpr):
    """The token that wins in a group, from its tokens' masses [GROUP]: its score and its id."""
    GROUP: tl.constexpr = masses.shape[0]
    token = winner * GROUP + tl.arange(0, GROUP)
    score = tl.log(masses) + gumbel_noise(state, token.to(tl.uint32), USE_FP64)
    return tl.reduce((tl.where(masses > 0, score, -INFINITY), token), 0, ahead)


@triton.jit
def draw_without(
    logits,
    num_columns,
    temperature,
    top,
    excluded,  # this token has no mass; -1 for none
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Draws from softmax(logits / temperature) without a token: the best group's score, -inf if nothing is left, and the
    token."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    bound = in_lanes(bound)
    bounds, places, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        groups = places * LEAD + tl.arange(0, LEAD)
        column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        runs = bounds >= best
        x = load_logits(logits + column, (column < num_columns) & (column != excluded) & runs[:, None])
        # Relative to the group's own largest, so that what is left beside a token with almost all mass is not lost.
        largest = maximum_or_nan(x, 1)
        finite = tl.where(largest == -INFINITY, 0.0, largest)
        masses = tl.exp(scale(x, finite[:, None], temperature, USE_FP64))
        offset = scale(finite, top, temperature, USE_FP64)
        score = group_scores(tl.sum(masses, 1), offset, groups, runs, state, USE_FP64)
        best, winner, kept = after_turn(best, winner, kept, score, groups, masses)
        bound = without(bound, places)
        bounds, places, highest = leaders(bound)
    _, token = race_of_tokens(kept, winner, state, USE_FP64)
    return best, token


@triton.jit
def draw_residual(
    logits,
    num_columns,
    draft_logits,
    column_of,
    temperature,
    top,
    mass,
    draft_top,
    draft_mass,  # infinite: from p, weighted
    weight,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for dense q: the best group's score, -inf if nothing is left, and the token."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    num_draft_columns = tl.where(draft_mass < INFINITY, num_columns, 0)
    bound = in_lanes(bound)
    bounds, places, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        groups = places * LEAD + tl.arange(0, LEAD)
        column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        runs = bounds >= best
        exists = (column < num_columns) & runs[:, None]
        x = load_logits(logits + column, exists)
        y = load_dense_draft(draft_logits, column_of, column, exists & (column < num_draft_columns))
        masses = probability(x, top, mass, temperature, USE_FP64) * weight
        masses -= probability(y, draft_top, draft_mass, temperature, USE_FP64)
        masses = tl.maximum(masses, 0.0)
        score = group_scores(tl.sum(masses, 1), 0.0, groups, runs, state, USE_FP64)
        best, winner, kept = after_turn(best, winner, kept, score, groups, masses)
        bound = without(bound, places)
        bounds, places, highest = leaders(bound)
    _, token = race_of_tokens(kept, winner, state, USE_FP64)
    return best, token


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
    """A piece of one row's list: target ids, -1 where none counts, the logits of target and draft: [LIST]."""
    listed = (ids >= 0) & (ids < num_columns)
    return tl.where(listed, ids, -1).to(tl.int32), load_logits(logits + ids, listed), y


@triton.jit
def load_piece(logits, draft, draft_row, width, num_columns, turn, LIST: tl.constexpr):
    """The turn-th piece of a row's list, as `with_target` has it; `width` 0: nothing is listed."""
    place = turn * LIST + tl.arange(0, LIST)
    listed = place < width
    ids = tl.load(draft.token_ids + draft_row * draft.token_ids_stride + place, mask=listed, other=-1)
    y = load_logits(draft.logits + draft_row * draft.logits_stride + place, listed)
    return with_target(logits, ids, y, num_columns)


@triton.jit
def piece_residual(piece, temperature, top, mass, draft_top, draft_mass, weight, USE_FP64: tl.constexpr):
    """max(weight p - q, 0) [LIST] of the ids of a piece of a list."""
    ids, x, y = piece
    residual = probability(x, top, mass, temperature, USE_FP64) * weight
    residual -= probability(y, draft_top, draft_mass, temperature, USE_FP64)
    return tl.where(ids >= 0, tl.maximum(residual, 0.0), 0.0)


@triton.jit
def listed_bits(ids, groups, GROUP: tl.constexpr):
    """Bits [LEAD, GROUP // 32] of the tokens of groups that are among the distinct ids."""
    word = groups[:, None] * (GROUP // 32) + tl.arange(0, GROUP // 32)[None, :]
    is_there = (ids >> 5)[:, None, None] == word[None, :, :]
    return tl.sum(tl.where(is_there, (1 << (ids & 31))[:, None, None], 0), 0)


@triton.jit
def draw_residual_of_list(
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
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Draws from max(weight p - q, 0) for q on a list of distinct ids: as `draw_residual`."""
    width = tl.where(draft_mass < INFINITY, draft.width, 0)
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    bound = in_lanes(bound)
    bounds, places, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        groups = places * LEAD + tl.arange(0, LEAD)
        column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        runs = bounds >= best
        x = load_logits(logits + column, (column < num_columns) & runs[:, None])
        listed = tl.zeros([LEAD, GROUP // 32], tl.int32)
        listed_mass = compute_type(tl.zeros([LEAD], tl.float32), USE_FP64)
        for turn in tl.static_range(LISTS):
            if turn == 0 and first is not None:
                piece = first[0], first[1], tl.where(width > 0, first[2], -INFINITY)
            else:
                piece = load_piece(logits, draft, draft_row, width, num_columns, turn, LIST)
            left = piece_residual(piece, temperature, top, mass, draft_top, draft_mass, weight, USE_FP64)
            listed |= listed_bits(piece[0], groups, GROUP)
            is_there = (piece[0] >= 0)[:, None] & ((piece[0] // GROUP)[:, None] == groups[None, :])
            listed_mass += tl.sum(tl.where(is_there, left[:, None], 0.0), 0)
        is_listed = ((listed[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0
        masses = probability(x, top, mass, temperature, USE_FP64) * weight
        masses = tl.where(tl.reshape(is_listed, [LEAD, GROUP]), 0.0, masses)
        score = group_scores(tl.sum(masses, 1) + listed_mass, 0.0, groups, runs, state, USE_FP64)
        best, winner, kept = after_turn(best, winner, kept, score, groups, masses)
        bound = without(bound, places)
        bounds, places, highest = leaders(bound)
    score, token = race_of_tokens(kept, winner, state, USE_FP64)
    for turn in tl.static_range(LISTS):
        if turn == 0 and first is not None:
            piece = first[0], first[1], tl.where(width > 0, first[2], -INFINITY)
        else:
            piece = load_piece(logits, draft, draft_row, width, num_columns, turn, LIST)
        left = piece_residual(piece, temperature, top, mass, draft_top, draft_mass, weight, USE_FP64)
        left = tl.where(piece[0] // GROUP == winner, left, 0.0)
        own = tl.log(left) + gumbel_noise(state, piece[0].to(tl.uint32), USE_FP64)
        own, own_token = tl.reduce((tl.where(left > 0, own, -INFINITY), piece[0]), 0, ahead)
        score, token = ahead(score, token, own, own_token)
    return best, token
