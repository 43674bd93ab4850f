"""One pass over a row of logits: what verification and sampling need of it, kept per group of tokens.

A draw is a race: token x arrives at E(x) / exp(score(x)), E being exponential noise, and the first to arrive wins. E is
at least its uniform u, so exp(score) / u is no less than one over the arrival, without a logarithm. The pass keeps, for
each group of GROUP tokens, the largest logit and the lead of each of LANES lanes (1: the group; 32: what one thread
holds): the largest root of exp(score) / u. `draftwire_kernels.gpu.race` then looks exactly at the few lanes that can
still win. The bound holds for float32 and float64 noise alike.

Roots, because one over the root of u is one instruction, which a division is not; the square of the other, of
exp(score), is the token's mass. Each warp adds up the masses of its groups, and a program those of its warps
(`of_program`). Masses of groups are float32 sums, and are added up in float64 when float64 is asked for.

A program takes TILE groups at a time; program `split` of SPLITS takes every SPLITS-th tile. A tile is
[TILE, GROUP // LINE, LINE] tokens, LINE being what a warp loads with 16 bytes a thread (128 tokens in float32, 256 in
16 bits), so that a group lies in one warp: first each thread reduces what it holds, then the warp, which stores the
result itself. The warps of a program do not wait for each other before its end.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import neighbour_words, row_state, token_words, uniform_floor

INFINITY = tl.constexpr(float("inf"))
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
NO_INDEX = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCORE = tl.constexpr(-300.0)  # 2 to this is 0
_LARGE_SCORE = tl.constexpr(2.0**14)  # its last bit is 2**-10
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
    """float32 logits of a tile, -inf beyond the row; only the row's last tile pays for the mask."""
    first = tile * (TILE * GROUP)
    logits += first.to(tl.int64)
    column = tile_columns(tile * 0, TILE, GROUP, LINE)  # of the tile: constants, which loads have room for
    if first + TILE * GROUP <= num_columns:
        x = tl.load(logits + column)
    else:
        x = tl.load(logits + column, mask=column < num_columns - first, other=-INFINITY)
    return x.to(tl.float32)


@triton.jit
def tile_words(state, tile, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Words of the columns of a tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = (tile * TILE + tl.arange(0, TILE))[:, None, None] * GROUP
    within = tl.arange(0, LINE)[None, None, :]
    return neighbour_words(state, group.to(tl.uint32), within.to(tl.uint32), line.to(tl.uint32))


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
def lane_maximum(x, LANES: tl.constexpr):
    """Maximum [TILE, LANES] of a tile; lane i of a group is what its threads i, i + LANES, ... hold."""
    TILE: tl.constexpr = x.shape[0]
    x = tl.max(tl.reshape(tl.max(x, 1), [TILE, 32, x.shape[2] // 32]), 2)
    return tl.max(tl.reshape(x, [TILE, 32 // LANES, LANES]), 1)


@triton.jit
def store_lanes(pointers, group, num_groups, values):
    """Stores the values [TILE, LANES] of groups. They are made as wide as a warp, of which the first threads write: so
    each warp stores what it has, where a narrow tensor would go through shared memory and two barriers."""
    TILE: tl.constexpr = values.shape[0]
    LANES: tl.constexpr = values.shape[1]
    thread = tl.arange(0, 32)[None, :]
    values = tl.reshape(tl.broadcast_to(values[:, None, :], [TILE, 32 // LANES, LANES]), [TILE, 32])
    mask = (group < num_groups)[:, None] & (thread < LANES)
    tl.store(pointers + group[:, None] * LANES + thread, values, mask=mask)


@triton.jit
def group_squares(x):
    """Sums [TILE] of the squares of a tile's groups. Of four neighbouring lines, which a thread has, squares are added
    by the instruction that makes them."""
    TILE: tl.constexpr = x.shape[0]
    LINES: tl.constexpr = x.shape[1]
    LINE: tl.constexpr = x.shape[2]
    if LINES % 4 == 0:
        quarters = tl.permute(tl.reshape(x, [TILE, LINES // 4, 2, 2, LINE]), [0, 1, 4, 2, 3])
        left, right = tl.split(quarters)
        a, b = tl.split(left)
        c, d = tl.split(right)
        total = group_sum(tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, a * a))))
    else:
        total = group_sum(x * x)
    return total


@triton.jit
def roots(x, largest, inverse):
    """Roots of exp((x - largest) / temperature) of a tile."""
    finite = tl.where(largest == -INFINITY, 0.0, largest)
    return tl.exp2((x - finite[:, None, None]) * (0.5 * inverse))


@triton.jit
def exact_masses(x, largest, inverse):
    """Masses [TILE] of groups. Those of tokens are at most 1: an infinite logit counts as the largest finite one."""
    root = roots(x, largest, inverse)
    return group_sum(tl.clamp(root * root, 0.0, 1.0))


@triton.jit
def has_large_scores(top, temperature):
    """Whether the largest logit of several groups, over the temperature, is too large in magnitude for `masses`."""
    return tl.abs(tl.where(top == -INFINITY, 0.0, top)) * tl.minimum(LOG2_E / temperature, MAX_FLOAT) >= _LARGE_SCORE


@triton.jit
def masses(x, largest, inverse):
    """The masses [TILE] of groups by fewer instructions. That of a group whose scores are all far below
    0 comes out too small, which does not show beside scores that are not; see `has_large_scores`."""
    finite = tl.where(largest == -INFINITY, 0.0, largest)
    score = tl.minimum(tl.maximum(finite * inverse, -_LARGE_SCORE), _LARGE_SCORE)
    mass = group_sum(tl.exp2(tl.fma(x, inverse, -score[:, None, None])))
    return mass * tl.exp2(tl.minimum(tl.fma(-finite, inverse, score), 1.0))  # what rounding took from the product


@triton.jit
def with_groups(top, mass, largest, part, temperature):
    """Maxima and masses [TILE] of the groups so far, and after those of one more tile."""
    both = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
    mass = mass * exponents(top, both, temperature)
    return both, mass + part * exponents(largest, both, temperature)


@triton.jit
def _larger_or_nan_of_both(a, b, other_a, other_b):
    return _larger_or_nan(a, other_a), _larger_or_nan(b, other_b)


@triton.jit
def _sums_of_both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def of_program(top, mass, temperature):
    """Maximum and mass of what a program has read of a row, from those of its warps [TILE]."""
    program_top = maximum_or_nan(top, 0)
    return program_top, tl.sum(mass * exponents(top, program_top, temperature), 0)


@triton.jit
def of_program_both(top, mass, draft_top, draft_mass, temperature):
    """The same for a row and its draft's: warps wait for each other half as often."""
    tops = tl.reduce((top, draft_top), 0, _larger_or_nan_of_both)
    mass *= exponents(top, tops[0], temperature)
    draft_mass *= exponents(draft_top, tops[1], temperature)
    masses = tl.reduce((mass, draft_mass), 0, _sums_of_both)
    return tops[0], masses[0], tops[1], masses[1]


@triton.jit
def scan_sampled(
    x,  # the program's first tile, on its way
    logits,  # pointer to the row
    token_ids,  # pointer to the columns' target ids, or None
    num_columns,
    temperature,
    key,  # of the row's noise, with position and offset
    position,
    offset,
    split,
    group_top,  # pointers to the row's entries, one a group and LANES a group
    lane_lead,
    WITH_MASS: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Looks at every SPLITS-th tile; returns each warp's largest logit and the mass relative to it [TILE], which is 0
    unless WITH_MASS, and infinite where a logit is."""
    num_groups = tl.cdiv(num_columns, GROUP)
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    state = row_state(key, position, offset)
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
    for tile in range(split, num_tiles, SPLITS):
        group = tile * TILE + tl.arange(0, TILE)
        largest = tl.minimum(group_maximum(x), MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        root = roots(x, largest, inverse)
        if WITH_MASS:
            top, mass = with_groups(top, mass, largest, group_squares(root), temperature)
        else:
            top = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
        store_lanes(group_top, group, num_groups, largest[:, None])
        if token_ids is None:
            words = tile_words(state, tile, TILE, GROUP, LINE)
        else:
            column = tile_columns(tile, TILE, GROUP, LINE)
            ids = tl.load(token_ids + column, mask=column < num_columns, other=0)
            words = token_words(state, ids.to(tl.uint32))
        # Ordered as their bits, since none is negative: of integers one instruction compares three.
        lead = (root * tl.rsqrt(uniform_floor(words))).to(tl.int32, bitcast=True)
        lead = lane_maximum(lead, LANES).to(tl.float32, bitcast=True)
        store_lanes(lane_lead, group, num_groups, lead)
        if tile + SPLITS < num_tiles:
            x = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)
    return top, mass


@triton.jit
def scan_greedy(
    x,  # the program's first tile, on its way
    logits,
    num_columns,
    split,
    group_top,
    group_index,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Fills the groups of every SPLITS-th tile with the largest logit and the bits of the lowest column that has it."""
    num_groups = tl.cdiv(num_columns, GROUP)
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    for tile in range(split, num_tiles, SPLITS):
        column = tile_columns(tile, TILE, GROUP, LINE)
        finite = tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        largest = group_maximum(finite)
        lowest = group_minimum(tl.where(finite == largest[:, None, None], column, NO_INDEX))
        group = tile * TILE + tl.arange(0, TILE)
        store_lanes(group_top, group, num_groups, largest[:, None])
        store_lanes(group_index, group, num_groups, lowest.to(tl.float32, bitcast=True)[:, None])
        if tile + SPLITS < num_tiles:
            x = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)


@triton.jit
def scan_masses(
    x,  # the program's first tile, on its way, or None
    logits,
    num_columns,
    temperature,
    split,
    IS_LARGE: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Each warp's largest logit of every SPLITS-th tile, and the mass relative to it: [TILE]. Masses are wrong for a
    row that `has_large_scores`, unless IS_LARGE says so."""
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
    y = load_tile(logits, split, num_columns, TILE, GROUP, LINE) if x is None else x
    for tile in range(split, num_tiles, SPLITS):
        largest = tl.minimum(group_maximum(y), MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        part = exact_masses(y, largest, inverse) if IS_LARGE else masses(y, largest, inverse)
        top, mass = with_groups(top, mass, largest, part, temperature)
        if tile + SPLITS < num_tiles:
            y = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)
    return top, mass


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
        x = load_tile(logits, tile, num_columns, TILE, GROUP, LINE)
        score = (tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL) - top) * inverse
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
