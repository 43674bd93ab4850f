"""Sampling in two races (step 6 of `draftwire_kernels.noise`): of groups by their mass, then of the winner's tokens.

The scan's results bound the score of each group, because the mass of p in a group is at least that of the residual.
Every turn computes the exact mass of the groups with the highest bounds, of one or of LEAD lanes of groups; the race
ends when no bound exceeds the best score. Then the tokens of the winning group race, with the masses of that turn.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.batch import at
from draftwire_kernels.gpu.noise import group_state, gumbel_ceiling, gumbel_noise, token_words
from draftwire_kernels.gpu.race import MARGIN, RELATIVE_MARGIN, ahead, compute_type, highest_of, packed, scale, unpacked
from draftwire_kernels.gpu.scan import (
    INFINITY,
    MAX_FLOAT,
    NO_INDEX,
    inverse_of,
    load_dense_draft,
    load_logits,
    maximum_or_nan,
)

LEAD = tl.constexpr(2)  # if much of p may be removed: two groups are less often both empty than one
LOST = tl.constexpr(1e-5)  # upper bound of a mass's relative rounding error


@triton.jit
def load_rows(first, second, row, exists, count, COUNT: tl.constexpr):
    """Load the largest logits and the masses of each group or part of rows: [ROWS, COUNT] each."""
    place = tl.arange(0, COUNT)[None, :]
    index = row[:, None] * count + place
    mask = exists[:, None] & (place < count)
    top = tl.load(first + index, mask=mask, other=-INFINITY, cache_modifier=".cg")
    return top, tl.load(second + index, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def with_noise(bound, state):
    """Return the bounds [GROUPS] of the scores of groups from the bounds of the logarithms of their masses."""
    group = tl.arange(0, bound.shape[0])
    return bound + (MARGIN + gumbel_ceiling(token_words(group_state(state), group.to(tl.uint32))))


@triton.jit
def group_bounds(largest, mass, top, temperature, state):
    """Bound the scores of groups [GROUPS] from `scan_groups`; masses are relative to exp(top / temperature)."""
    score = tl.maximum((largest - top) / temperature, -MAX_FLOAT)
    bound = with_noise(score * (1.0 - RELATIVE_MARGIN) + tl.log(mass), state)
    return tl.where(largest > -INFINITY, bound, -INFINITY)


@triton.jit
def residual_bounds(mass, state):
    """Bound the scores of groups [GROUPS] from the results of `scan_residual`."""
    return tl.where(mass > 0, with_noise(tl.log(mass), state), -INFINITY)


@triton.jit
def less_token(mass, group, token_mass):
    """Return the masses [GROUPS] of groups, without a token's mass in one of them; an upper bound under rounding."""
    own = tl.arange(0, mass.shape[0]) == group
    return tl.where(own, tl.maximum(mass - token_mass * (1.0 - LOST), mass * LOST), mass)


@triton.jit
def in_lanes(bound, LEAD: tl.constexpr):
    """Reshape bounds [GROUPS] to lanes [GROUPS // LEAD, LEAD]; neighbours are in different lanes."""
    GROUPS: tl.constexpr = bound.shape[0]
    return tl.reshape(bound, [GROUPS // LEAD, LEAD])


@triton.jit
def leaders(bound):
    """Return each lane's highest bound, rounded up, and its place [LEAD], and the overall highest bound."""
    SIZE: tl.constexpr = bound.shape[0]
    leading = tl.max(packed(bound, tl.arange(0, SIZE)[:, None], SIZE), 0)
    bounds, places = unpacked(leading, SIZE)
    return bounds, places, unpacked(tl.max(leading, 0), SIZE)[0]


@triton.jit
def without(bound, places):
    """Return the bounds without each lane's group at `places`."""
    return tl.where(tl.arange(0, bound.shape[0])[:, None] == places[None, :], -INFINITY, bound)


@triton.jit
def token_masses(x, top, temperature, share, USE_FP64: tl.constexpr):
    """Return share * exp((x - top) / temperature), at most `share`, without a division for speed."""
    if USE_FP64:
        inverse = tl.full([], 1.0, tl.float64) / temperature.to(tl.float64)
        masses = tl.exp((x.to(tl.float64) - top.to(tl.float64)) * inverse) * share
    else:
        masses = tl.exp2((x - top) * inverse_of(temperature)) * share
    return masses


@triton.jit
def group_noise(groups, state, USE_FP64: tl.constexpr):
    return gumbel_noise(group_state(state), groups.to(tl.uint32), USE_FP64)


@triton.jit
def after_turn(best, winner, kept, groups, runs, noise, mass, masses):
    """Return the best score so far, its group and the masses of its tokens [GROUP], including LEAD more groups."""
    score = tl.where(runs & (mass > 0), tl.log(mass) + noise, -INFINITY)
    score, group = tl.reduce((score, groups), 0, ahead)
    is_ahead = (score > best) | ((score == best) & (group < winner))
    kept = tl.where(is_ahead, tl.sum(tl.where((groups == group)[:, None], masses, 0.0), 0), kept)
    return tl.where(is_ahead, score, best), tl.where(is_ahead, group, winner), kept


@triton.jit
def race_of_tokens(masses, winner, state, USE_FP64: tl.constexpr):
    """Return score and id of the winning token in a group with the masses [GROUP]."""
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
    """Sample from softmax(logits / temperature) without a token; return the best group's score, -inf if no mass is
    left, and the token. Computes one group per turn, because bounds are almost exact."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    one = compute_type(tl.full([], 1.0, tl.float32), USE_FP64)
    highest, group = highest_of(bound)
    while (highest > -INFINITY) & (highest >= best):
        column = group * GROUP + tl.arange(0, GROUP)
        x = load_logits(logits + column, (column < num_columns) & (column != excluded))
        # The next group and the noise do not wait for the logits.
        bound = tl.where(tl.arange(0, bound.shape[0]) == group, -INFINITY, bound)
        highest, following = highest_of(bound)
        noise = group_noise(group, state, USE_FP64)
        # Relative to the group's largest logit, which is precise even if the excluded token has almost all mass.
        largest = maximum_or_nan(x, 0)
        finite = tl.where(largest == -INFINITY, 0.0, largest)
        masses = token_masses(x, finite, temperature, one, USE_FP64)
        score = tl.log(tl.sum(masses, 0)) + scale(finite, top, temperature, USE_FP64) + noise
        is_ahead = (largest > -INFINITY) & ((score > best) | ((score == best) & (group < winner)))
        kept = tl.where(is_ahead, masses, kept)
        best, winner = tl.where(is_ahead, score, best), tl.where(is_ahead, group, winner)
        group = following
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
    p_share,  # weight over the mass of the row
    draft_top,
    q_share,  # 1 over the mass of q; 0 to sample from p
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LEAD: tl.constexpr,
):
    """Sample from max(weight p - q, 0) for dense q; return the best group's score, -inf if no mass is left, and the
    token."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    num_draft_columns = tl.where(q_share > 0, num_columns, 0)
    bound = in_lanes(bound, LEAD)
    bounds, places, highest = leaders(bound)
    while (highest > -INFINITY) & (highest >= best):
        groups = places * LEAD + tl.arange(0, LEAD)
        column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        runs = bounds >= best
        exists = (column < num_columns) & runs[:, None]
        x = load_logits(logits + column, exists)
        y = load_dense_draft(draft_logits, column_of, column, exists & (column < num_draft_columns))
        bound = without(bound, places)
        bounds, places, highest = leaders(bound)
        noise = group_noise(groups, state, USE_FP64)
        masses = token_masses(x, top, temperature, p_share, USE_FP64)
        masses = tl.maximum(masses - token_masses(y, draft_top, temperature, q_share, USE_FP64), 0.0)
        best, winner, kept = after_turn(best, winner, kept, groups, runs, noise, tl.sum(masses, 1), masses)
    _, token = race_of_tokens(kept, winner, state, USE_FP64)
    return best, token


@triton.jit
def load_lists(draft, draft_row, drafted, turn, LIST: tl.constexpr):
    """Return the turn-th piece of the rows' lists: target ids, -1 for none, and draft logits, [ROWS, LIST] each."""
    place = turn * LIST + tl.arange(0, LIST)[None, :]
    listed = drafted[:, None] & (place < draft.width)
    ids = draft.token_ids + draft_row[:, None] * draft.token_ids_stride + place
    y = load_logits(draft.logits + draft_row[:, None] * draft.logits_stride + place, listed)
    return tl.load(ids, mask=listed, other=-1), y


@triton.jit
def with_target(logits, ids, y, num_columns):
    """Return a piece of one row's list: target ids, -1 for invalid ones, logits of target and draft: [LIST] each."""
    listed = (ids >= 0) & (ids < num_columns)
    return tl.where(listed, ids, -1).to(tl.int32), load_logits(logits + ids, listed), y


@triton.jit
def load_piece(logits, draft, draft_row, width, num_columns, turn, LIST: tl.constexpr):
    """Return the turn-th piece of a row's list in the form of `with_target`; `width` 0 is an empty list."""
    place = turn * LIST + tl.arange(0, LIST)
    listed = place < width
    ids = tl.load(draft.token_ids + draft_row * draft.token_ids_stride + place, mask=listed, other=-1)
    y = load_logits(draft.logits + draft_row * draft.logits_stride + place, listed)
    return with_target(logits, ids, y, num_columns)


@triton.jit
def piece_residual(piece, temperature, top, p_share, draft_top, q_share, USE_FP64: tl.constexpr):
    """Return max(weight p - q, 0) [LIST] for the ids of a piece of a list."""
    ids, x, y = piece
    residual = token_masses(x, top, temperature, p_share, USE_FP64)
    residual -= token_masses(y, draft_top, temperature, q_share, USE_FP64)
    return tl.where(ids >= 0, tl.maximum(residual, 0.0), 0.0)


@triton.jit
def with_listed(masses, column, group, ids, listed):
    """Return the masses [GROUP] of a group's tokens with those of the distinct ids [LIST] replaced, one at a time."""
    GROUP: tl.constexpr = masses.shape[0]
    ids = tl.where((ids >= 0) & (ids // GROUP == group), ids, NO_INDEX)
    lowest = tl.min(ids, 0)
    while lowest < NO_INDEX:
        masses = tl.where(column == lowest, at(listed, ids, lowest), masses)
        ids = tl.where(ids == lowest, NO_INDEX, ids)
        lowest = tl.min(ids, 0)
    return masses


@triton.jit
def draw_residual_of_list(
    logits,
    draft,
    draft_row,
    first,  # first piece of the row's list, or None to load it
    num_columns,
    temperature,
    top,
    p_share,
    draft_top,
    q_share,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Sample from max(weight p - q, 0) for q on a list of distinct ids: `draw_residual` with one group per turn."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], 0, tl.int32)
    kept = compute_type(tl.zeros([GROUP], tl.float32), USE_FP64)
    width = tl.where(q_share > 0, draft.width, 0)
    highest, group = highest_of(bound)
    while (highest > -INFINITY) & (highest >= best):
        column = group * GROUP + tl.arange(0, GROUP)
        x = load_logits(logits + column, column < num_columns)
        bound = tl.where(tl.arange(0, bound.shape[0]) == group, -INFINITY, bound)
        highest, following = highest_of(bound)
        noise = group_noise(group, state, USE_FP64)
        masses = token_masses(x, top, temperature, p_share, USE_FP64)
        if first is None:
            piece = load_piece(logits, draft, draft_row, width, num_columns, 0, LIST)
        else:
            piece = tl.where(width > 0, first[0], -1), first[1], first[2]
        left = piece_residual(piece, temperature, top, p_share, draft_top, q_share, USE_FP64)
        masses = with_listed(masses, column, group, piece[0], left)
        for turn in range(1, LISTS):
            piece = load_piece(logits, draft, draft_row, width, num_columns, turn, LIST)
            left = piece_residual(piece, temperature, top, p_share, draft_top, q_share, USE_FP64)
            masses = with_listed(masses, column, group, piece[0], left)
        mass = tl.sum(masses, 0)
        score = tl.log(mass) + noise
        is_ahead = (mass > 0) & ((score > best) | ((score == best) & (group < winner)))
        kept = tl.where(is_ahead, masses, kept)
        best, winner = tl.where(is_ahead, score, best), tl.where(is_ahead, group, winner)
        group = following
    _, token = race_of_tokens(kept, winner, state, USE_FP64)
    return best, token
