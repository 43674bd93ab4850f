"""One pass over a row of logits, which stores results per group of neighbouring tokens for the sampling program.

- `scan_groups`: the largest logit and the mass relative to it. Verification samples a group by its mass, then a token
  of the group (`draftwire_kernels.gpu.draw`), so noise is computed only for groups and one group's tokens.
- `scan_masses`: the same for each of a program's TILE parts of a row, for rows of which only the mass is needed: dense
  q, and all rows in the first launch of block verification.
- `scan_sampled`: bounds for one race of all tokens: `gumbel_sample` and "coupled". Token x arrives at
  E(x) / exp(score(x)), E being exponential noise, and the first to arrive wins. E is at least its uniform u, so
  exp(score) / u is an upper bound of one over the arrival that needs no logarithm. The pass stores the largest square
  root of the bound in each group, because one over the root of u is one instruction, in contrast to a division.
  `draftwire_kernels.gpu.race` evaluates the few groups that can still win. The bound is valid for float32 and float64.
- `scan_tops`: only the largest logit, at temperature 0.
- `scan_residual`: masses of max(weight p - q, 0) for block verification.

A program processes TILE groups at a time; program `split` of SPLITS processes every SPLITS-th tile. A tile is
[TILE, GROUP // LINE, LINE] tokens, LINE being the tokens that a warp loads with 16 bytes per thread (128 in float32,
256 in 16 bits), so that a group is in one warp: each thread reduces its values, then the warp reduces and stores the
result. The warps of a program do not synchronise before its end.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import neighbour_words, row_state, token_words, uniform_floor

INFINITY = tl.constexpr(float("inf"))
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
NO_INDEX = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCORE = tl.constexpr(-300.0)  # 2 to this is 0
_RESIDUAL_MARGIN = tl.constexpr(1e-4)  # above the relative rounding error of a probability
_RELATIVE_MARGIN = tl.constexpr(2e-6)  # the same, per unit of the score


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_or_nan(x, axis: tl.constexpr):
    """Return the maximum along an axis; NaN if any is NaN."""
    return tl.reduce(x, axis, _larger_or_nan)


@triton.jit
def load_logits(pointers, mask):
    """Load float32 logits, -inf outside of the mask, +inf as the largest finite value."""
    x = tl.load(pointers, mask=mask, other=-INFINITY).to(tl.float32)
    return tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_dense_draft(draft_logits, column_of, column, mask):
    """Return the draft logits of target ids, through the table of a reduced vocabulary if there is one."""
    if column_of is None:
        y = load_logits(draft_logits + column, mask)
    else:
        place = tl.load(column_of + column, mask=mask, other=-1)
        y = load_logits(draft_logits + place, place >= 0)
    return y


@triton.jit
def exponents(x, top, temperature):
    """Return exp((x - top) / temperature), 0 if top is -inf."""
    top = tl.where(top == -INFINITY, 0.0, top)
    return tl.exp2((x - top) * tl.minimum(LOG2_E / temperature, MAX_FLOAT))


@triton.jit
def tile_columns(tile, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Return the columns [TILE, GROUP // LINE, LINE] of a tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = tile * TILE + tl.arange(0, TILE)
    return group[:, None, None] * GROUP + line + tl.arange(0, LINE)[None, None, :]


@triton.jit
def load_tile(logits, tile, num_columns, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Load float32 logits of a tile, -inf past the row; only the row's last tile uses a mask."""
    first = tile * (TILE * GROUP)
    logits += first.to(tl.int64)
    column = tile_columns(tile * 0, TILE, GROUP, LINE)  # relative to the tile, so that loads have constant offsets
    if first + TILE * GROUP <= num_columns:
        x = tl.load(logits + column)
    else:
        x = tl.load(logits + column, mask=column < num_columns - first, other=-INFINITY)
    return x.to(tl.float32)


@triton.jit
def tile_words(state, tile, TILE: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr):
    """Return the words of the columns of a tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = (tile * TILE + tl.arange(0, TILE))[:, None, None] * GROUP
    within = tl.arange(0, LINE)[None, None, :]
    return neighbour_words(state, group.to(tl.uint32), within.to(tl.uint32), line.to(tl.uint32))


@triton.jit
def group_maximum(x):
    """Return the maximum [TILE] of the groups of a tile; NaN if any is NaN."""
    return maximum_or_nan(maximum_or_nan(x, 1), 1)


@triton.jit
def group_sum(x):
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def store_groups(pointers, group, num_groups, values):
    """Store a number [TILE] for each group, broadcast to a warp whose first thread writes: a narrow tensor would go
    through shared memory and two barriers."""
    TILE: tl.constexpr = values.shape[0]
    thread = tl.arange(0, 32)[None, :]
    wide = tl.broadcast_to(values[:, None], [TILE, 32])
    tl.store(pointers + group[:, None] + thread * 0, wide, mask=(group < num_groups)[:, None] & (thread == 0))


@triton.jit
def group_tops(x):
    """Return the largest logits [TILE] of a tile, +inf as the largest finite value; NaN if any is NaN."""
    return tl.minimum(group_maximum(x), MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_masses(x, inverse):
    """Return the largest logits [TILE] of a tile and masses relative to them, with `inverse` of `inverse_of`."""
    x = tl.minimum(x, MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
    largest = group_maximum(x)
    finite = tl.where(largest == -INFINITY, 0.0, largest)
    return largest, group_sum(tl.exp2((x - finite[:, None, None]) * inverse))


@triton.jit
def inverse_of(temperature):
    """Return 1 over the temperature, in units of log 2; finite at temperature 0."""
    return tl.minimum(LOG2_E / temperature, MAX_FLOAT)


@triton.jit
def scan_groups(
    x,  # the program's first tile
    logits,  # pointer to the row
    num_columns,
    temperature,
    split,
    group_top,  # pointers to the row's entries, one per group
    group_mass,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store the largest logit and relative mass of every SPLITS-th tile's groups; no valid mass at temperature 0."""
    num_groups = tl.cdiv(num_columns, GROUP)
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    inverse = inverse_of(temperature)
    for tile in range(split, num_tiles, SPLITS):
        largest, mass = group_masses(x, inverse)
        group = tile * TILE + tl.arange(0, TILE)
        store_groups(group_top, group, num_groups, largest)
        store_groups(group_mass, group, num_groups, mass)
        if tile + SPLITS < num_tiles:
            x = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)


@triton.jit
def scan_masses(
    x,  # the program's first tile, or None
    logits,
    num_columns,
    temperature,
    split,
    part_top,  # pointers to the program's entries: TILE
    part_mass,
    is_wanted,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store largest logit and relative mass of each of TILE parts of every SPLITS-th tile."""
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    inverse = inverse_of(temperature)
    y = load_tile(logits, split, num_columns, TILE, GROUP, LINE) if x is None else x
    for tile in range(split, num_tiles, SPLITS):
        largest, part = group_masses(y, inverse)
        both = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
        mass = mass * exponents(top, both, temperature) + part * exponents(largest, both, temperature)
        top = both
        if tile + SPLITS < num_tiles:
            y = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)
    place = tl.arange(0, TILE)
    count = tl.where(is_wanted, TILE, 0)
    store_groups(part_top, place, count, top)
    store_groups(part_mass, place, count, mass)


@triton.jit
def scan_sampled(
    x,  # the program's first tile
    logits,  # pointer to the row
    token_ids,  # pointer to the columns' target ids, or None
    num_columns,
    temperature,
    key,  # of the row's noise, with position and offset
    position,
    offset,
    split,
    group_top,  # pointers to the row's entries, one per group
    group_lead,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store largest logit and largest root of exp(score) / u of the groups of every SPLITS-th tile."""
    num_groups = tl.cdiv(num_columns, GROUP)
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    state = row_state(key, position, offset)
    inverse = inverse_of(temperature)
    for tile in range(split, num_tiles, SPLITS):
        group = tile * TILE + tl.arange(0, TILE)
        largest = group_tops(x)
        store_groups(group_top, group, num_groups, largest)
        finite = tl.where(largest == -INFINITY, 0.0, largest)
        root = tl.exp2((x - finite[:, None, None]) * (0.5 * inverse))
        if token_ids is None:
            words = tile_words(state, tile, TILE, GROUP, LINE)
        else:
            column = tile_columns(tile, TILE, GROUP, LINE)
            ids = tl.load(token_ids + column, mask=column < num_columns, other=0)
            words = token_words(state, ids.to(tl.uint32))
        # Non-negative floats are ordered like their bits, and one instruction compares three integers.
        lead = (root * tl.rsqrt(uniform_floor(words))).to(tl.int32, bitcast=True)
        store_groups(group_lead, group, num_groups, tl.max(tl.max(lead, 1), 1).to(tl.float32, bitcast=True))
        if tile + SPLITS < num_tiles:
            x = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)


@triton.jit
def scan_tops(
    x,  # the program's first tile
    logits,
    num_columns,
    split,
    group_top,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store the largest logit of the groups of every SPLITS-th tile."""
    num_tiles = tl.cdiv(num_columns, TILE * GROUP)
    for tile in range(split, num_tiles, SPLITS):
        store_groups(group_top, tile * TILE + tl.arange(0, TILE), tl.cdiv(num_columns, GROUP), group_tops(x))
        if tile + SPLITS < num_tiles:
            x = load_tile(logits, tile + SPLITS, num_columns, TILE, GROUP, LINE)


@triton.jit
def lowest_argmax(logits, largest, top, num_columns, GROUP: tl.constexpr):
    """Return the lowest column with the largest logit `top` of a row, given the largest logits of groups [GROUPS]."""
    GROUPS: tl.constexpr = largest.shape[0]
    group = tl.min(tl.where(largest == top, tl.arange(0, GROUPS), GROUPS), 0)
    column = group * GROUP + tl.arange(0, GROUP)
    x = load_logits(logits + column, column < num_columns)
    return tl.min(tl.where(x == top, column, NO_INDEX), 0)


@triton.jit
def residuals(score, p_share, draft_score, q_share):
    """Return p - q of tokens and an upper bound under rounding, given (logit - top) / temperature in units of log 2 and
    1 over the masses; p if `draft_score` is None."""
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
    draft_logits,  # None for the residual weight p
    column_of,
    num_columns,
    temperature,
    top,
    p_share,  # weight of p, over the mass of its row
    draft_top,
    q_share,  # 1 over the mass of q; 0 for the residual weight p
    first_tile,
    step,
    group_mass,  # pointer to the row's entries, one per group
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
):
    """Return the mass [TILE] of max(weight p - q, 0) in every step-th tile; store upper bounds of groups' masses."""
    num_groups = tl.cdiv(num_columns, GROUP)
    inverse = inverse_of(temperature)
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
        group = tile * TILE + tl.arange(0, TILE)
        store_groups(group_mass, group, num_groups, group_sum(tl.maximum(above, 0.0)))
    return sums
