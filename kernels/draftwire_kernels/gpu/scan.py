"""One pass over a row of logits: what verification and sampling need of it, kept per group of tokens.

A draw is a race: token x arrives at E(x) / exp(score(x)), E being exponential noise, and the first to arrive wins. E is
at least its uniform u, so u / exp(score) bounds every arrival from below without a logarithm. The pass keeps, for
each group of GROUP tokens, the largest logit, and the smallest bound of each of LANES lanes (1: of the group; 32: of
what one thread holds); `draftwire_kernels.gpu.race` then looks exactly at the few lanes that can still win. The bound
holds for float32 and float64 noise alike.

Masses are sums of float32 exponentials, added up in float64 when float64 is asked for.

A program takes TILE groups at a time; program `split` of num_splits takes TURNS tiles, num_splits apart. A tile is
[TILE, GROUP // LINE, LINE] tokens, LINE being what a warp loads with 16 bytes a thread (128 tokens in float32, 256 in
16 bits), so that a group lies in one warp: first each thread reduces what it holds, then the warp, without a barrier.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import neighbour_words, token_words, uniform_floor

INFINITY = tl.constexpr(float("inf"))
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
NO_INDEX = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCORE = tl.constexpr(-300.0)  # 2 to this is 0
_RESIDUAL_MARGIN = tl.constexpr(1e-4)  # over the rounding of a probability, relative to it
_RELATIVE_MARGIN = tl.constexpr(2e-6)  # likewise, for each unit of its score


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_or_nan(x, axis: tl.constexpr):
    """Maximum along an axis; NaN if there is one."""
    return tl.reduce(x, axis, _larger_or_nan)


@triton.jit
def load_logits(pointers, mask):
    """float32 logits, -inf outside the mask, +inf as the largest finite value."""
    x = tl.load(pointers, mask=mask, other=-INFINITY).to(tl.float32)
    return tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_dense_draft(draft_logits, column_of, column, mask):
    """Draft logits of target ids, through the table of a reduced vocabulary if there is one."""
    if column_of is None:
        y = load_logits(draft_logits + column, mask)
    else:
        place = tl.load(column_of + column, mask=mask, other=-1)
        y = load_logits(draft_logits + place, place >= 0)
    return y


@triton.jit
def exponents(x, top, temperature):
    """exp((x - top) / temperature), 0 where everything is -inf."""
    top = tl.where(top == -INFINITY, 0.0, top)
    return tl.exp2((x - top) * tl.minimum(LOG2_E / temperature, MAX_FLOAT))


@triton.jit
def tile_columns(tile, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Columns [TILE, GROUP // LINE, LINE] of a tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = tile * TILE + tl.arange(0, TILE)
    return group[:, None, None] * GROUP + line + tl.arange(0, LINE)[None, None, :]


@triton.jit
def load_tile(logits, tile, num_columns, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """What `load_logits` gives of a tile; only the row's last tile pays for the mask."""
    column = tile_columns(tile, TILE, GROUP, LINE)
    if (tile + 1) * (TILE * GROUP) <= num_columns:
        x = tl.load(logits + column).to(tl.float32)
    else:
        x = tl.load(logits + column, mask=column < num_columns, other=-INFINITY).to(tl.float32)
    return tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_words(state, tile, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Words of the columns of a tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = (tile * TILE + tl.arange(0, TILE))[:, None, None] * GROUP
    within = line ^ tl.arange(0, LINE)[None, None, :]
    return neighbour_words(state, group.to(tl.uint32), within.to(tl.uint32))


@triton.jit
def group_maximum(x):
    """Maximum [TILE] of the groups of a tile; NaN if there is one."""
    return maximum_or_nan(maximum_or_nan(x, 1), 1)


@triton.jit
def group_sum(x):
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def group_minimum(x):
    return tl.min(tl.min(x, 1), 1)


@triton.jit
def scan_sampled(
    logits,  # pointer to the row
    token_ids,  # pointer to the columns' target ids, or None
    num_columns,
    temperature,
    state,  # of the row's noise
    split,
    num_splits,
    group_top,  # pointers to the row's entries, one a group and LANES a group
    lane_floor,
    WITH_NOISE: tl.constexpr,  # fills the groups
    WITH_MASS: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Looks at every num_splits-th tile; returns its largest logit and the mass relative to it (0 unless WITH_MASS)."""
    num_groups = tl.cdiv(num_columns, GROUP)
    inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    for turn in range(TURNS):
        tile = split + turn * num_splits
        x = load_tile(logits, tile, num_columns, TILE, GROUP, LINE)
        largest = group_maximum(x)
        finite = tl.where(largest == -INFINITY, 0.0, largest)[:, None, None]
        below = x - finite
        if WITH_NOISE:
            if token_ids is None:
                words = tile_words(state, tile, TILE, GROUP, LINE)
            else:
                column = tile_columns(tile, TILE, GROUP, LINE)
                ids = tl.load(token_ids + column, mask=column < num_columns, other=0)
                words = token_words(state, ids.to(tl.uint32))
            arrival = uniform_floor(words) * tl.exp2(below * -inverse)
            group = tile * TILE + tl.arange(0, TILE)
            tl.store(group_top + group, largest, mask=group < num_groups)
            if LANES == 1:
                tl.store(lane_floor + group, group_minimum(arrival), mask=group < num_groups)
            else:
                runs = tl.reshape(tl.min(arrival, 1), [TILE, LANES, LINE // LANES])
                lane = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
                tl.store(lane_floor + lane, tl.min(runs, 2), mask=(group < num_groups)[:, None])
        both = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
        if WITH_MASS:
            part = group_sum(tl.exp2(below * inverse))
            mass = mass * exponents(top, both, temperature)
            mass += part * exponents(largest, both, temperature)
        top = both
    row_top = maximum_or_nan(top, 0)
    return row_top, tl.sum(mass * exponents(top, row_top, temperature), 0)


@triton.jit
def scan_greedy(
    logits,
    num_columns,
    split,
    num_splits,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """The largest logit of every num_splits-th tile and the lowest column that has it."""
    top = tl.full([TILE], -INFINITY, tl.float32)
    at = tl.full([TILE], NO_INDEX, tl.int32)
    for turn in range(TURNS):
        tile = split + turn * num_splits
        column = tile_columns(tile, TILE, GROUP, LINE)
        x = load_tile(logits, tile, num_columns, TILE, GROUP, LINE)
        largest = group_maximum(x)
        lowest = group_minimum(tl.where(x == largest[:, None, None], column, NO_INDEX))
        at = tl.where(largest > top, lowest, at)
        top = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
    row_top = maximum_or_nan(top, 0)
    return row_top, tl.min(tl.where(top == row_top, at, NO_INDEX), 0)


@triton.jit
def scan_draft(
    logits,
    num_columns,
    temperature,
    split,
    num_splits,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Largest draft logit of every num_splits-th tile and the mass relative to it."""
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    for turn in range(TURNS):
        x = load_tile(logits, split + turn * num_splits, num_columns, TILE, GROUP, LINE)
        both = tl.maximum(top, group_maximum(x), propagate_nan=tl.PropagateNan.ALL)
        mass = mass * exponents(top, both, temperature) + group_sum(exponents(x, both[:, None, None], temperature))
        top = both
    row_top = maximum_or_nan(top, 0)
    return row_top, tl.sum(mass * exponents(top, row_top, temperature), 0)


@triton.jit
def scan_list(
    target_logits,
    num_columns,
    logits,
    token_ids,
    width,
    temperature,
    token,
    target_at_ids,
    USE_FP64: tl.constexpr,
    LIST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Largest logit of a row's list of draft logits, the mass relative to it, and that of the drafted token. Fills the
    row's `target_at_ids`: a draw that follows waits once for memory, not twice."""
    top = tl.full([], -INFINITY, tl.float32)
    mass = tl.full([], 0.0, tl.float64 if USE_FP64 else tl.float32)
    token_mass = mass
    for turn in range(LISTS):
        place = turn * LIST + tl.arange(0, LIST)
        x = load_logits(logits + place, place < width)
        ids = tl.load(token_ids + place, mask=place < width, other=-1)
        target = load_logits(target_logits + ids, (ids >= 0) & (ids < num_columns))
        tl.store(target_at_ids + place, target, mask=place < width)
        both = tl.maximum(top, maximum_or_nan(x, 0), propagate_nan=tl.PropagateNan.ALL)
        part = exponents(x, both, temperature).to(mass.dtype)
        kept = exponents(top, both, temperature)
        mass = mass * kept + tl.sum(part, 0)
        token_mass = token_mass * kept + tl.sum(tl.where(ids == token, part, 0.0), 0)
        top = both
    return top, mass, token_mass


@triton.jit
def residuals(score, p_share, draft_score, q_share):
    """p - q of tokens, and what it does not exceed whatever the rounding, from (logit - top) / temperature in units of
    log 2 and 1 over the masses; `draft_score` None: p alone."""
    score = tl.maximum(score, _LEAST_SCORE)
    p = tl.exp2(score) * p_share
    above = p * tl.fma(score, -_RELATIVE_MARGIN, 1.0 + _RESIDUAL_MARGIN)
    residual = p
    if draft_score is not None:
        draft_score = tl.maximum(draft_score, _LEAST_SCORE)
        q = tl.exp2(draft_score) * q_share
        above = tl.fma(-q, tl.fma(draft_score, _RELATIVE_MARGIN, 1.0 - _RESIDUAL_MARGIN), above)
        residual -= q
    return residual, above


@triton.jit
def scan_residual(
    logits,
    draft_logits,  # None: the residual is weight p
    column_of,
    num_columns,
    temperature,
    state,
    top,
    p_share,  # weight of p, over the mass of its row
    draft_top,
    q_share,  # 1 over the mass of q; 0 where the residual is weight p
    first_tile,
    step,
    group_floor,  # pointer to the row's entries, one a group
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
):
    """Mass of max(weight p - q, 0) in every step-th tile; fills its groups with bounds of log residual + noise: the
    smallest uniform / residual, the residual rounded up by more than the error of its terms."""
    num_groups = tl.cdiv(num_columns, GROUP)
    inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
    num_draft_columns = tl.where(q_share > 0, num_columns, 0)
    sums = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    for tile in range(first_tile, tl.cdiv(num_columns, TILE * GROUP), step):
        score = (load_tile(logits, tile, num_columns, TILE, GROUP, LINE) - top) * inverse
        draft_score = None
        if draft_logits is not None:
            column = tile_columns(tile, TILE, GROUP, LINE)
            y = load_dense_draft(draft_logits, column_of, column, column < num_draft_columns)
            draft_score = (y - draft_top) * inverse
        residual, above = residuals(score, p_share, draft_score, q_share)
        sums += group_sum(tl.maximum(residual, 0.0))
        floor = uniform_floor(tile_words(state, tile, TILE, GROUP, LINE))
        # The root loses nothing that can win: above 2**-126 it is exact to 1 in 2**22.
        root = tl.rsqrt(above)
        arrival = tl.where(above > 0, floor * root * root, INFINITY)
        group = tile * TILE + tl.arange(0, TILE)
        tl.store(group_floor + group, group_minimum(arrival), mask=group < num_groups)
    return tl.sum(sums, 0)
