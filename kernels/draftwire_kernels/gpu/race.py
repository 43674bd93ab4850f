"""The exact end of one race of all tokens, with the bounds of `draftwire_kernels.gpu.scan.scan_sampled`.

Every turn bounds each token of the group with the highest bound, and computes the exact scores of tokens that may still
win, usually one or two; the race ends when no bound exceeds the best score.
"""

import triton
import triton.language as tl

from draftwire_kernels.gpu.noise import gumbel_noise, log_floor, log_lead, token_words, uniform_floor
from draftwire_kernels.gpu.scan import INFINITY, NO_INDEX, load_logits

MARGIN = tl.constexpr(1e-4)  # above the rounding error of a bound, in units of a score
RELATIVE_MARGIN = tl.constexpr(2e-6)  # the same, relative to the score


@triton.jit
def compute_type(x, USE_FP64: tl.constexpr):
    # A single return, because for Triton's compiler a return in a constant branch does not end the function.
    return x.to(tl.float64 if USE_FP64 else tl.float32)


@triton.jit
def scale(x, top, temperature, USE_FP64: tl.constexpr):
    """Return (x - top) / temperature, at most 0."""
    if USE_FP64:
        scaled = (x.to(tl.float64) - top.to(tl.float64)) / temperature.to(tl.float64)
    else:
        scaled = tl.div_rn(x - top, temperature)
    return scaled


@triton.jit
def probability(x, top, mass, temperature, USE_FP64: tl.constexpr):
    return tl.exp(scale(x, top, temperature, USE_FP64)) / mass


@triton.jit
def load_groups(group_top, group_other, num_groups, GROUPS: tl.constexpr):
    """Load a scan's results for a row's groups: largest logits, and masses or leads, [GROUPS] each."""
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    largest = tl.load(group_top + group, mask=exists, other=-INFINITY, cache_modifier=".cg")
    return largest, tl.load(group_other + group, mask=exists, other=0.0, cache_modifier=".cg")


@triton.jit
def race_bounds(largest, lead, top, temperature):
    """Bound the scores (logit - top) / temperature + noise of each group: [GROUPS]."""
    score = (largest - top) / temperature
    bound = score * (1.0 - RELATIVE_MARGIN) + MARGIN + 2.0 * log_lead(lead)
    return tl.where(score > -INFINITY, bound, -INFINITY)


@triton.jit
def _in_order(bits):
    """Convert the bits of a float32 to an int32 with the same order, or back."""
    return bits ^ ((bits >> 31) & NO_INDEX)


@triton.jit
def packed(bound, index, SIZE: tl.constexpr):
    """Return an int32 with the order of the bounds, rounded up to make room for an index below SIZE (a power of two) in
    the last bits, so that one reduction finds the highest bound and its index."""
    return (_in_order(bound.to(tl.int32, bitcast=True)) | (SIZE - 1)) ^ index


@triton.jit
def unpacked(packed, SIZE: tl.constexpr):
    """Return the bound, rounded up, and the index."""
    return _in_order(packed | (SIZE - 1)).to(tl.float32, bitcast=True), (packed & (SIZE - 1)) ^ (SIZE - 1)


@triton.jit
def highest_of(bound):
    """Return the highest of bounds [N], rounded up, and its index."""
    SIZE: tl.constexpr = bound.shape[0]
    return unpacked(tl.max(packed(bound, tl.arange(0, SIZE), SIZE), 0), SIZE)


@triton.jit
def ahead(best, winner, score, token):
    """Return the better of two tokens, the lower id on ties."""
    is_better = (score > best) | ((score == best) & (token < winner))
    return tl.where(is_better, score, best), tl.where(is_better, token, winner)


@triton.jit
def race_of_target(
    logits,
    token_ids,
    num_columns,
    temperature,
    top,
    state,
    bound,
    USE_FP64: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sample from softmax(logits / temperature); return the winning column."""
    best = compute_type(tl.full([], -INFINITY, tl.float32), USE_FP64)
    winner = tl.full([], NO_INDEX, tl.int32)
    highest, group = highest_of(bound)
    while (highest > -INFINITY) & (highest >= best):
        column = group * GROUP + tl.arange(0, GROUP)
        runs = column < num_columns
        x = load_logits(logits + column, runs)
        ids = column if token_ids is None else tl.load(token_ids + column, mask=runs, other=0)
        floor = uniform_floor(token_words(state, ids.to(tl.uint32)))
        ceiling = (x - top) / temperature * (1.0 - RELATIVE_MARGIN) + (MARGIN - log_floor(floor))
        ceiling = tl.where(x > -INFINITY, ceiling, -INFINITY)
        candidate, place = highest_of(ceiling)
        while (candidate > -INFINITY) & (candidate >= best):
            token = group * GROUP + place
            score = scale(load_logits(logits + token, True), top, temperature, USE_FP64)
            id = token if token_ids is None else tl.load(token_ids + token)
            score += gumbel_noise(state, id.to(tl.uint32), USE_FP64)
            best, winner = ahead(best, winner, score, token)
            ceiling = tl.where(column == token, -INFINITY, ceiling)
            candidate, place = highest_of(ceiling)
        bound = tl.where(tl.arange(0, bound.shape[0]) == group, -INFINITY, bound)
        highest, group = highest_of(bound)
    return winner
