"""One pass over a row of logits: what verification and sampling need of it, kept per group of tokens.

A draw is a race: token x arrives at E(x) / exp(score(x)), E being exponential noise, and the first to arrive wins. E is
at least its uniform u, so u / exp(score) bounds every arrival from below without a logarithm. The pass keeps, for
each group of GROUP tokens, the largest logit, and the smallest bound of each of LANES lanes (1: of the group; 32: of
what one thread holds); `draftwire_kernels.gpu.race` then looks exactly at the few lanes that can still win. The bound
holds for float32 and float64 noise alike.

Masses are sums of float32 exponentials, added up in float64 when float64 is asked for.

A program takes TILE groups at a time; program `split` of num_splits takes TURNS tiles, num_splits apart. A tile is
[TILE, GROUP // LINE, LINE] float32 tokens, so that each group lies in one warp, with 16-byte loads: first each thread
reduces what it holds, then the warp, without a barrier.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import token_words, uniform_floor

INFINITY = tl.constexpr(float("inf"))
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
LINE = tl.constexpr(128)
RUN = tl.constexpr(4)  # neighbouring tokens of a thread
NO_INDEX = tl.constexpr(2**31 - 1)
_LOG2_E = tl.constexpr(1.4426950408889634)


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
def exponents(x, top, temperature):
    """exp((x - top) / temperature), 0 where everything is -inf."""
    top = tl.where(top == -INFINITY, 0.0, top)
    return tl.exp2((x - top) * tl.minimum(_LOG2_E / temperature, MAX_FLOAT))


@triton.jit
def tile_columns(turn, split, num_splits, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Columns [TILE, GROUP // LINE, LINE] of a program's tile."""
    line = tl.arange(0, GROUP // LINE)[None, :, None] * LINE
    group = (split + turn * num_splits) * TILE + tl.arange(0, TILE)
    return group[:, None, None] * GROUP + line + tl.arange(0, LINE)[None, None, :]


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
    WITH_MASS: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Fills the groups of every num_splits-th tile; returns the largest logit of those and the mass relative to it
    (0 unless WITH_MASS)."""
    num_groups = tl.cdiv(num_columns, GROUP)
    inverse = tl.minimum(_LOG2_E / temperature, MAX_FLOAT)
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    for turn in range(TURNS):
        column = tile_columns(turn, split, num_splits, TILE, GROUP)
        inside = column < num_columns
        x = load_logits(logits + column, inside)
        largest = group_maximum(x)
        finite = tl.where(largest == -INFINITY, 0.0, largest)[:, None, None]
        score = (x - finite) * inverse
        ids = column if token_ids is None else tl.load(token_ids + column, mask=inside, other=0)
        arrival = uniform_floor(token_words(state, ids.to(tl.uint32))) * tl.exp2(-score)
        group = (split + turn * num_splits) * TILE + tl.arange(0, TILE)
        tl.store(group_top + group, largest, mask=group < num_groups)
        if LANES == 1:
            tl.store(lane_floor + group, group_minimum(arrival), mask=group < num_groups)
        else:
            runs = tl.reshape(tl.min(arrival, 1), [TILE, LANES, LINE // LANES])
            lane = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
            tl.store(lane_floor + lane, tl.min(runs, 2), mask=(group < num_groups)[:, None])
        both = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
        if WITH_MASS:
            part = group_sum(tl.exp2(score))
            mass = mass * exponents(top, both, temperature)
            mass += part * exponents(largest, both, temperature)
        top = both
    row_top = maximum_or_nan(top, 0)
    return row_top, tl.sum(mass * exponents(top, row_top, temperature), 0)


@triton.jit
def scan_greedy(logits, num_columns, split, num_splits, TILE: tl.constexpr, GROUP: tl.constexpr, TURNS: tl.constexpr):
    """The largest logit of every num_splits-th tile and the lowest column that has it."""
    top = tl.full([TILE], -INFINITY, tl.float32)
    at = tl.full([TILE], NO_INDEX, tl.int32)
    for turn in range(TURNS):
        column = tile_columns(turn, split, num_splits, TILE, GROUP)
        x = load_logits(logits + column, column < num_columns)
        largest = group_maximum(x)
        lowest = group_minimum(tl.where(x == largest[:, None, None], column, NO_INDEX))
        at = tl.where(largest > top, lowest, at)
        top = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
    row_top = maximum_or_nan(top, 0)
    return row_top, tl.min(tl.where(top == row_top, at, NO_INDEX), 0)


@triton.jit
def scan_draft(
    logits,
    token_ids,
    num_columns,
    temperature,
    token,
    split,
    num_splits,
    SPARSE: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Largest draft logit of every num_splits-th tile, the mass relative to it, and that of the drafted token."""
    top = tl.full([TILE], -INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    token_mass = tl.zeros([TILE], tl.float64 if USE_FP64 else tl.float32)
    for turn in range(TURNS):
        column = tile_columns(turn, split, num_splits, TILE, GROUP)
        inside = column < num_columns
        x = load_logits(logits + column, inside)
        largest = group_maximum(x)
        both = tl.maximum(top, largest, propagate_nan=tl.PropagateNan.ALL)
        part = exponents(x, both[:, None, None], temperature)
        kept = exponents(top, both, temperature)
        mass = mass * kept + group_sum(part)
        if SPARSE:
            drafted = tl.load(token_ids + column, mask=inside, other=-1) == token
            token_mass = token_mass * kept + group_sum(tl.where(drafted, part, 0.0))
        top = both
    row_top = maximum_or_nan(top, 0)
    kept = exponents(top, row_top, temperature)
    return row_top, tl.sum(mass * kept, 0), tl.sum(token_mass * kept, 0)
