"""min-p, top-k and top-p as one threshold on the logits of a row, found without sorting.

Each filter keeps the logits above a threshold: min-p those whose score is at least log min_p, top-k those of at least
the largest value that k logits reach, top-p (after the others) those of at least the largest value whose tail mass
reaches top_p. The last two thresholds are searched between a value that suffices and one that does not. One look at
the row sums the tails of three values in between: in the first looks they divide the values evenly, later the bits of
the logits' type, which are ordered like integers, so that equal logits are kept or removed together. When few logits
remain in between, they are gathered, and the search continues among them until at most one is left.

A program processes a row, which stays in the second-level cache between looks if the rows in progress fit. It reads
tiles [THREADS, TURNS, VECTOR], VECTOR being 16 bytes of logits, so that each thread sums its own values. Gathered
values are read by other threads: each look ends with a reduction over all threads, each gathering with a barrier.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwire_kernels.gpu.scan import INFINITY, MAX_FLOAT, inverse_of, maximum_or_nan
from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.transfer import upload

THREADS, HELD, BYTES = 512, 16, 16
"""Threads of a program, logits per thread and tile, and bytes per load."""
MIN_FLOAT = tl.constexpr(1.1754943508222875e-38)
NAN = tl.constexpr(float("nan"))
_LOOKS_BY_VALUE = tl.constexpr(3)


@triton.jit
def _order(x):
    """Return an int64 ordered as the floats `x`, with -0 just below 0, although they are equal as floats."""
    width: tl.constexpr = x.dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if width == 16 else tl.int32
    bits = x.to(integer, bitcast=True)
    return (bits ^ ((bits >> (width - 1)) & (2 ** (width - 1) - 1))).to(tl.int64)


@triton.jit
def _float(order, DTYPE: tl.constexpr):
    """Return the float32 of an order (see `_order`)."""
    width: tl.constexpr = DTYPE.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if width == 16 else tl.int32
    bits = order.to(integer)
    return (bits ^ ((bits >> (width - 1)) & (2 ** (width - 1) - 1))).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _tile(logits, start, vocab, TURNS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """Return the logits [THREADS, TURNS, VECTOR] from column `start` on, -inf past the row, and their columns."""
    turn = tl.arange(0, TURNS)[None, :, None] * (THREADS * VECTOR)
    column = start + turn + tl.arange(0, THREADS)[:, None, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    return tl.load(logits + column, mask=column < vocab, other=-INFINITY), column


@triton.jit
def _by_thread(x):
    """Sum each row [TURNS, VECTOR] of a tile, which one thread holds: [THREADS]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _mass(x, top, inverse):
    """Return the masses relative to the largest logit's."""
    return tl.exp2(tl.minimum(x - top, 0.0) * inverse)


@triton.jit
def _look(
    logits,
    size,
    vocab,
    low,
    middle,
    high,
    top,
    inverse,
    BY_MASS: tl.constexpr,
    TURNS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the number of logits of at least each of three values, and with BY_MASS their masses, else the counts."""
    from_low = tl.zeros([THREADS], tl.float32)
    from_middle = tl.zeros([THREADS], tl.float32)
    from_high = tl.zeros([THREADS], tl.float32)
    mass_low = tl.zeros([THREADS], tl.float32)
    mass_middle = tl.zeros([THREADS], tl.float32)
    mass_high = tl.zeros([THREADS], tl.float32)
    for start in range(0, size, TURNS * THREADS * VECTOR):
        x = _tile(logits, start, vocab, TURNS, THREADS, VECTOR)[0].to(tl.float32)
        from_low += _by_thread(tl.where(x >= low, 1.0, 0.0))
        from_middle += _by_thread(tl.where(x >= middle, 1.0, 0.0))
        from_high += _by_thread(tl.where(x >= high, 1.0, 0.0))
        if BY_MASS:
            mass = _mass(x, top, inverse)
            mass_low += _by_thread(tl.where(x >= low, mass, 0.0))
            mass_middle += _by_thread(tl.where(x >= middle, mass, 0.0))
            mass_high += _by_thread(tl.where(x >= high, mass, 0.0))
    counts = tl.reduce((from_low, from_middle, from_high), 0, _add_three)
    sums = counts
    if BY_MASS:
        sums = tl.reduce((mass_low, mass_middle, mass_high), 0, _add_three)
    return counts, sums


@triton.jit
def _closer(reaches, count, fails, above, sum_above, order, count_there, sum_there, needed):
    """Update the search after a look at `order`: the orders that suffice and fail, their counts, and the sum of
    `fails`."""
    is_reached = sum_there >= needed
    rises, falls = is_reached & (order > reaches), ~is_reached & (order < fails)
    reaches, count = tl.where(rises, order, reaches), tl.where(rises, count_there, count)
    above, sum_above = tl.where(falls, count_there, above), tl.where(falls, sum_there, sum_above)
    return reaches, count, tl.where(falls, order, fails), above, sum_above


@triton.jit
def _gather(source, memory, size, vocab, low, end, TURNS: tl.constexpr, LANES: tl.constexpr):
    """Move finite logits in [low, end) to the front of `memory`, padded with -inf; return the number of places, whole
    tiles. Each of LANES columns is compacted separately, so `memory` may be `source`."""
    lane = tl.arange(0, LANES)
    length = tl.zeros([LANES], tl.int32)
    for start in range(0, size, TURNS * LANES):
        column = start + tl.arange(0, TURNS)[:, None] * LANES + lane[None, :]
        x = tl.load(source + column, mask=column < vocab, other=-INFINITY)
        value = x.to(tl.float32)
        is_kept = ((value >= low) & ~(value >= end) & (value > -INFINITY)).to(tl.int32)
        place = length[None, :] + tl.cumsum(is_kept, 0) - 1
        tl.store(memory + place * LANES + lane[None, :], x, mask=is_kept > 0)
        length += tl.sum(is_kept, 0)
    places = tl.cdiv(tl.max(length, 0), TURNS) * TURNS
    for place in range(0, places):
        column = place * LANES + lane
        tl.store(memory + column, -INFINITY, mask=(place >= length) & (column < vocab))
    tl.debug_barrier()
    return places * LANES


@triton.jit
def _search(
    source,
    memory,  # [vocab], may be `source`
    size,  # of `source`: `vocab`, or whole tiles
    vocab,
    reaches,  # order that suffices, or the result if none does
    count,  # of the finite logits of at least `reaches`
    fails,
    needed,  # with BY_MASS the share of the mass of `reaches`
    bottom,  # where the first looks begin, if above `reaches`
    top,
    inverse,
    keeps_above,  # gather all logits of at least `reaches`, not only those below `fails`
    BY_MASS: tl.constexpr,
    TURNS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the highest order that suffices (or of the smallest logit above it), the count of at least that order, and
    with `keeps_above` the memory and size of all logits of at least that order."""
    dtype: tl.constexpr = source.dtype.element_ty
    above, sum_above = count * 0, count * 0  # of `fails`, a NaN if past +inf
    count_aside, sum_aside = count * 0, count * 0  # of `fails` when `source` was gathered
    limit = count * 0 + size  # gather when an eighth remains
    turn = 0
    while (fails - reaches > 1) & (count - above > 1):
        remaining = tl.where(keeps_above, count, count - above)
        if (size > TURNS * THREADS * VECTOR) & (8 * remaining <= limit):
            end = tl.where(keeps_above, NAN, _float(fails, dtype))
            size = _gather(source, memory, size, vocab, _float(reaches, dtype), end, TURNS, THREADS * VECTOR)
            source, limit = memory, remaining
            count_aside, sum_aside = tl.where(keeps_above, 0.0, above), tl.where(keeps_above, 0.0, sum_above)
        if turn < _LOOKS_BY_VALUE:
            low = tl.maximum(_float(reaches, dtype), bottom)
            quarter = (tl.minimum(_float(fails - 1, dtype), top) - low) / 4
            first, second = _order((low + quarter).to(dtype)), _order((low + 2 * quarter).to(dtype))
            third = _order((low + 3 * quarter).to(dtype))
        else:
            width = fails - reaches
            first, second = reaches + (width + 3) // 4, reaches + (width + 1) // 2
            third = reaches + (3 * width + 3) // 4
        first = tl.maximum(reaches + 1, tl.minimum(first, fails - 1))
        if BY_MASS:
            first = tl.where(turn == 0, reaches, first)  # the whole mass
        second = tl.maximum(reaches + 1, tl.minimum(second, fails - 1))
        third = tl.maximum(reaches + 1, tl.minimum(third, fails - 1))
        counts, sums = _look(
            source, size, vocab, _float(first, dtype), _float(second, dtype), _float(third, dtype), top, inverse,
            BY_MASS, TURNS, THREADS, VECTOR,
        )  # fmt: skip
        if BY_MASS:
            needed = tl.where(turn == 0, needed * sums[0], needed)
        reaches, count, fails, above, sum_above = _closer(
            reaches, count, fails, above, sum_above, first, count_aside + counts[0], sum_aside + sums[0], needed
        )
        reaches, count, fails, above, sum_above = _closer(
            reaches, count, fails, above, sum_above, second, count_aside + counts[1], sum_aside + sums[1], needed
        )
        reaches, count, fails, above, sum_above = _closer(
            reaches, count, fails, above, sum_above, third, count_aside + counts[2], sum_aside + sums[2], needed
        )
        turn += 1
    if fails - reaches > 1:
        last = tl.full([THREADS], -INFINITY, tl.float32)
        for start in range(0, size, TURNS * THREADS * VECTOR):
            x = _tile(source, start, vocab, TURNS, THREADS, VECTOR)[0].to(tl.float32)
            x = tl.where(x >= _float(fails, dtype), -INFINITY, x)
            last = tl.maximum(last, tl.max(tl.max(x, 2), 1))
        reaches = tl.maximum(reaches, _order(tl.max(last, 0).to(dtype)))
    return reaches, count, source, size


@triton.jit
def _threshold(
    logits,
    memory,
    vocab,
    temperature,
    log_min_p,
    top_k,
    top_p,
    TURNS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the smallest logit that the filters keep; -inf if they keep all, or if the row has a NaN."""
    dtype: tl.constexpr = logits.dtype.element_ty
    threshold = tl.full([], -INFINITY, tl.float32)
    largest = tl.full([THREADS], -INFINITY, tl.float32)
    sums = tl.zeros([THREADS], tl.float32)
    finite = tl.zeros([THREADS], tl.float32)
    for start in range(0, vocab, TURNS * THREADS * VECTOR):
        x = _tile(logits, start, vocab, TURNS, THREADS, VECTOR)[0].to(tl.float32)
        most = maximum_or_nan(maximum_or_nan(x, 2), 1)
        largest = tl.maximum(largest, most, propagate_nan=tl.PropagateNan.ALL)
        sums += _by_thread(tl.where(x > -INFINITY, x, 0.0))
        finite += _by_thread(tl.where(x > -INFINITY, 1.0, 0.0))
    most = maximum_or_nan(largest, 0)
    most = tl.where(most == 0, 0.0, most)  # -0 is equal to 0, whose order is higher
    if most > -INFINITY:
        top = tl.minimum(most, MAX_FLOAT)
        count = tl.sum(finite, 0)
        inverse = tl.maximum(inverse_of(temperature), MIN_FLOAT)  # positive, because 0 * -inf is NaN
        if log_min_p > -INFINITY:
            lowest = tl.full([THREADS], INFINITY, tl.float32)
            kept = tl.zeros([THREADS], tl.float32)
            for start in range(0, vocab, TURNS * THREADS * VECTOR):
                x = _tile(logits, start, vocab, TURNS, THREADS, VECTOR)[0].to(tl.float32)
                is_kept = tl.div_rn(tl.minimum(x, MAX_FLOAT) - top, temperature + tl.zeros_like(x)) >= log_min_p
                lowest = tl.minimum(lowest, tl.min(tl.min(tl.where(is_kept, x, INFINITY), 2), 1))
                kept += _by_thread(tl.where(is_kept, 1.0, 0.0))
            threshold = tl.minimum(tl.min(lowest, 0), top)
            count = tl.sum(kept, 0)
        reaches, fails = _order(threshold.to(dtype)), _order(most.to(dtype)) + 1
        source, size = logits, vocab
        if top_k > 0:
            mean = tl.sum(sums, 0) / tl.sum(finite, 0)
            reaches, count, source, size = _search(
                source, memory, size, vocab, reaches, count, fails, top_k, mean, top, inverse, top_p < 1, False,
                TURNS, THREADS, VECTOR,
            )  # fmt: skip
        if top_p < 1:
            # Lower logits have too little mass to matter.
            bottom = top - tl.log2(count / (1 - top_p)) / inverse
            reaches, count, source, size = _search(
                source, memory, size, vocab, reaches, count, fails, top_p, bottom, top, inverse, False, True,
                TURNS, THREADS, VECTOR,
            )  # fmt: skip
        threshold = _float(reaches, dtype)
    return threshold


@triton.jit(do_not_specialize=["num_rows"])
def filter_kernel(
    logits,  # [R, V]
    logits_stride,
    filtered,  # [R, V], contiguous
    vocab,
    parameters,  # [4, R] float32: temperature; log min_p, -inf for none; top_k, 0 for none; top_p, 1 for none
    num_rows,
    TURNS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    filtered += row * vocab
    temperature = tl.load(parameters + row)
    log_min_p = tl.load(parameters + num_rows + row)
    top_k = tl.load(parameters + 2 * num_rows + row)
    top_p = tl.load(parameters + 3 * num_rows + row)
    threshold = tl.full([], -INFINITY, tl.float32)
    if (temperature > 0) & ((log_min_p > -INFINITY) | (top_k > 0) | (top_p < 1)):
        threshold = _threshold(logits, filtered, vocab, temperature, log_min_p, top_k, top_p, TURNS, THREADS, VECTOR)
    for start in range(0, vocab, TURNS * THREADS * VECTOR):
        x, column = _tile(logits, start, vocab, TURNS, THREADS, VECTOR)
        kept = tl.where(x.to(tl.float32) < threshold, -INFINITY, x.to(tl.float32))
        tl.store(filtered + column, kept.to(x.dtype), mask=column < vocab)


def apply_filters(logits: Tensor, sampling: LogitsSampling, layout: Layout) -> Tensor:
    """Filter logits like `reference.filters.apply_filters`.

    With parameters on the CPU, nothing is launched if no filter is used. The host does not wait for the device.
    """
    host = layout.first_row.device
    temperature = sampling.temperature.to(host)
    off = torch.zeros_like(temperature)
    min_p = off if sampling.min_p is None else sampling.min_p.to(host)
    top_k = off if sampling.top_k is None else sampling.top_k.to(host, torch.float32)
    top_p = off + 1 if sampling.top_p is None else sampling.top_p.to(host)
    top_k = torch.where(top_k < logits.shape[1], top_k.clamp(min=0), 0)
    if host.type == "cpu" and not bool(((temperature > 0) & ((min_p > 0) | (top_k > 0) | (top_p < 1))).any()):
        return logits
    parameters = torch.stack([temperature, min_p.log(), top_k, top_p])[:, layout.row_request]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    filtered = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    vector = BYTES // logits.element_size()
    threads = min(max(triton.next_power_of_2(triton.cdiv(logits.shape[1], HELD)), 32), THREADS)
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        filter_kernel[(logits.shape[0],)](
            logits,
            logits.stride(0),
            filtered,
            logits.shape[1],
            upload(parameters, logits.device).contiguous(),
            logits.shape[0],
            TURNS=HELD // vector,
            THREADS=threads,
            VECTOR=vector,
            num_warps=threads // 32,
        )
    return filtered
