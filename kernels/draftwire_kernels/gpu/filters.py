"""min-p, top-k and top-p as one threshold on the logits of a row, searched for without a sort.

Each filter keeps the logits from some value on: min-p those whose score reaches log min_p, top-k from the largest value
that k logits reach, top-p (of what the others keep) from the largest value from which on the mass reaches top_p. The
last two are found between one value that reaches what is needed and one that fails, on the bits of the logits' type,
which order like integers, so that equal logits stay or go together. A pass over the row looks at three values between:
first at a quarter, half and three quarters of the way from the mean to the largest logit, then at quarters of the bits.
As soon as no more logits are left than a program can hold, it gathers them, and searches on without the rest of the
row. A program takes a row, which stays in the second-level cache from pass to pass while the rows in work fit there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwire_kernels.gpu.scan import INFINITY, LOG2_E, MAX_FLOAT, maximum_or_nan
from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.transfer import upload

LANES, TURNS = 2048, 4
"""Logits that a program of 16 warps takes at a time: 16 bytes of float32 a thread, four times."""


@triton.jit
def _order(x):
    """int64 that orders as the float `x` does (-0 just below 0)."""
    width: tl.constexpr = x.dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if width == 16 else tl.int32
    bits = x.to(integer, bitcast=True)
    return (bits ^ ((bits >> (width - 1)) & (2 ** (width - 1) - 1))).to(tl.int64)


@triton.jit
def _float(order, DTYPE: tl.constexpr):
    """The float of that type, as float32."""
    width: tl.constexpr = DTYPE.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if width == 16 else tl.int32
    bits = order.to(integer)
    return (bits ^ ((bits >> (width - 1)) & (2 ** (width - 1) - 1))).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _load(logits, start, vocab, TURNS: tl.constexpr, LANES: tl.constexpr):
    """The next TURNS * LANES logits and their columns; -inf beyond the row."""
    column = start + tl.arange(0, TURNS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return tl.load(logits + column, mask=column < vocab, other=-INFINITY), column


@triton.jit
def _mass(x, top, inverse):
    """Masses relative to the largest logit's."""
    return tl.exp2(tl.minimum(x - top, 0.0) * inverse)


@triton.jit
def _closer(reaches, fails, first, second, third, at_first, at_second, at_third, needed):
    """Orders that reach and fail what is needed, after a look at three between them."""
    first_reaches, second_reaches, third_reaches = at_first >= needed, at_second >= needed, at_third >= needed
    fails = tl.where(first_reaches, tl.where(second_reaches, tl.where(third_reaches, fails, third), second), first)
    reaches = tl.where(third_reaches, third, tl.where(second_reaches, second, tl.where(first_reaches, first, reaches)))
    return reaches, fails


@triton.jit
def _quarters(reaches, fails):
    """Three orders between two that are more than one apart."""
    width = fails - reaches
    return reaches + (width + 3) // 4, reaches + (width + 1) // 2, tl.minimum(reaches + (3 * width + 3) // 4, fails - 1)


@triton.jit
def _narrow(
    logits,
    vocab,
    reaches,  # order that reaches what is needed, or the result where none does
    count,  # of the logits from it on, but for those of -inf
    fails,
    needed,
    top,
    mean,
    inverse,
    BY_MASS: tl.constexpr,
    TURNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """`reaches`, `count` and `fails` after as many passes over the row as it takes until few logits are left."""
    dtype: tl.constexpr = logits.dtype.element_ty
    first = _order((mean + 0.25 * (top - mean)).to(dtype))
    second = _order((mean + 0.5 * (top - mean)).to(dtype))
    third = _order((mean + 0.75 * (top - mean)).to(dtype))
    while (count > TURNS * LANES) & (fails - reaches > 1):
        first = tl.maximum(reaches + 1, tl.minimum(first, fails - 1))
        second = tl.maximum(reaches + 1, tl.minimum(second, fails - 1))
        third = tl.maximum(reaches + 1, tl.minimum(third, fails - 1))
        low, middle, high = _float(first, dtype), _float(second, dtype), _float(third, dtype)
        above_low = tl.zeros([LANES], tl.float32)
        above_middle = tl.zeros([LANES], tl.float32)
        above_high = tl.zeros([LANES], tl.float32)
        mass_low = tl.zeros([LANES], tl.float32)
        mass_middle = tl.zeros([LANES], tl.float32)
        mass_high = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab, TURNS * LANES):
            x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
            above_low += tl.sum(tl.where(x >= low, 1.0, 0.0), 0)
            above_middle += tl.sum(tl.where(x >= middle, 1.0, 0.0), 0)
            above_high += tl.sum(tl.where(x >= high, 1.0, 0.0), 0)
            if BY_MASS:
                mass = _mass(x, top, inverse)
                mass_low += tl.sum(tl.where(x >= low, mass, 0.0), 0)
                mass_middle += tl.sum(tl.where(x >= middle, mass, 0.0), 0)
                mass_high += tl.sum(tl.where(x >= high, mass, 0.0), 0)
        in_low, in_middle, in_high = tl.sum(above_low, 0), tl.sum(above_middle, 0), tl.sum(above_high, 0)
        if BY_MASS:
            sums = tl.sum(mass_low, 0), tl.sum(mass_middle, 0), tl.sum(mass_high, 0)
        else:
            sums = in_low, in_middle, in_high
        reaches, fails = _closer(reaches, fails, first, second, third, sums[0], sums[1], sums[2], needed)
        count = tl.where(reaches == first, in_low, count)
        count = tl.where(reaches == second, in_middle, count)
        count = tl.where(reaches == third, in_high, count)
        first, second, third = _quarters(reaches, fails)
    return reaches, count, fails


@triton.jit
def _gather(logits, gathered, vocab, value, TURNS: tl.constexpr, LANES: tl.constexpr):
    """[TURNS * LANES] float32: the logits above -inf from `value` on, no more than that many, and -inf behind them.
    `gathered` is memory for them."""
    lane = tl.arange(0, TURNS * LANES)
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab, TURNS * LANES):
        x = tl.load(logits + start + lane, mask=start + lane < vocab, other=-INFINITY)
        is_kept = (x.to(tl.float32) >= value) & (x.to(tl.float32) > -INFINITY)
        place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(gathered + place, x, mask=is_kept)
        count += tl.sum(is_kept.to(tl.int32), 0)
    tl.debug_barrier()
    x = tl.load(gathered + lane, mask=lane < count, other=-INFINITY)
    tl.debug_barrier()
    return x.to(tl.float32)


@triton.jit
def _settle(x, part, reaches, fails, needed, DTYPE: tl.constexpr):
    """The last order from which on the sum of `part` reaches what is needed."""
    while fails - reaches > 1:
        first, second, third = _quarters(reaches, fails)
        at_first = tl.sum(tl.where(x >= _float(first, DTYPE), part, 0.0), 0)
        at_second = tl.sum(tl.where(x >= _float(second, DTYPE), part, 0.0), 0)
        at_third = tl.sum(tl.where(x >= _float(third, DTYPE), part, 0.0), 0)
        reaches, fails = _closer(reaches, fails, first, second, third, at_first, at_second, at_third, needed)
    return reaches


@triton.jit
def _threshold(logits, memory, vocab, temperature, log_min_p, top_k, top_p, TURNS: tl.constexpr, LANES: tl.constexpr):
    """The smallest logit that the filters keep; -inf where they keep all, or the row has a NaN."""
    dtype: tl.constexpr = logits.dtype.element_ty
    threshold = tl.full([], -INFINITY, tl.float32)
    largest = tl.full([LANES], -INFINITY, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    finite = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, TURNS * LANES):
        x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
        largest = tl.maximum(largest, maximum_or_nan(x, 0), propagate_nan=tl.PropagateNan.ALL)
        sums += tl.sum(tl.where(x > -INFINITY, x, 0.0), 0)
        finite += tl.sum(tl.where(x > -INFINITY, 1.0, 0.0), 0)
    top = tl.minimum(maximum_or_nan(largest, 0), MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
    if top > -INFINITY:
        count = tl.sum(finite, 0)
        mean = tl.sum(sums, 0) / count
        inverse = tl.minimum(LOG2_E / temperature, MAX_FLOAT)
        if log_min_p > -INFINITY:
            lowest = tl.full([LANES], INFINITY, tl.float32)
            kept = tl.zeros([LANES], tl.float32)
            for start in range(0, vocab, TURNS * LANES):
                x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
                is_kept = tl.div_rn(x - top, temperature + x * 0) >= log_min_p
                lowest = tl.minimum(lowest, tl.min(tl.where(is_kept, x, INFINITY), 0))
                kept += tl.sum(tl.where(is_kept, 1.0, 0.0), 0)
            threshold = tl.minimum(tl.min(lowest, 0), top)
            count = tl.sum(kept, 0)
        reaches, fails = _order(threshold.to(dtype)), _order(top.to(dtype)) + 1
        if top_k > 0:
            reaches, count, end = _narrow(
                logits, vocab, reaches, count, fails, top_k, top, mean, inverse, False, TURNS, LANES
            )
            if end - reaches > 1:
                x = _gather(logits, memory, vocab, _float(reaches, dtype), TURNS, LANES)
                one = tl.where(x > -INFINITY, 1.0, 0.0)
                reaches = _settle(x, one, reaches, end, top_k, dtype)
                count = tl.sum(tl.where(x >= _float(reaches, dtype), one, 0.0), 0)
        if top_p < 1:
            end = fails
            needed = top_p * 0
            if count > TURNS * LANES:
                total = tl.zeros([LANES], tl.float32)
                for start in range(0, vocab, TURNS * LANES):
                    x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
                    total += tl.sum(tl.where(x >= _float(reaches, dtype), _mass(x, top, inverse), 0.0), 0)
                needed = top_p * tl.sum(total, 0)
                reaches, count, end = _narrow(
                    logits, vocab, reaches, count, fails, needed, top, mean, inverse, True, TURNS, LANES
                )
            if end - reaches > 1:
                x = _gather(logits, memory, vocab, _float(reaches, dtype), TURNS, LANES)
                mass = _mass(x, top, inverse)
                needed = tl.where(needed > 0, needed, top_p * tl.sum(mass, 0))
                reaches = _settle(x, mass, reaches, end, needed, dtype)
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
    LANES: tl.constexpr,
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
        threshold = _threshold(logits, filtered, vocab, temperature, log_min_p, top_k, top_p, TURNS, LANES)
    for start in range(0, vocab, TURNS * LANES):
        x, column = _load(logits, start, vocab, TURNS, LANES)
        kept = tl.where(x.to(tl.float32) < threshold, -INFINITY, x.to(tl.float32))
        tl.store(filtered + column, kept.to(x.dtype), mask=column < vocab)


def apply_filters(logits: Tensor, sampling: LogitsSampling, layout: Layout) -> Tensor:
    """As `reference.filters.apply_filters`; parameters on the CPU decide whether there is anything to do, parameters
    on the device are not waited for."""
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
    lanes = min(max(triton.next_power_of_2(triton.cdiv(logits.shape[1], TURNS)), 32), LANES)
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        filter_kernel[(logits.shape[0],)](
            logits,
            logits.stride(0),
            filtered,
            logits.shape[1],
            upload(parameters, logits.device).contiguous(),
            logits.shape[0],
            TURNS=TURNS,
            LANES=lanes,
            num_warps=max(lanes // 128, 1),
        )
    return filtered
