"""min-p, top-k and top-p as one threshold on the logits of a row, found by bisection, without a sort.

Each filter keeps the logits from some value on: min-p those whose score reaches log min_p, top-k from the largest value
that k logits reach, top-p (of what the others keep) from the largest value from which on the mass reaches top_p. The
last two are found on the bits of a float, which order like integers: a pass over the row looks at three values between
one that reaches and one that fails, so 16 passes are enough, and equal logits stay or go together. A program takes a
row, which stays in the second-level cache from pass to pass while the rows in work fit there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwire_kernels.gpu.scan import INFINITY, MAX_FLOAT, maximum_or_nan
from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.transfer import upload

_LOG2_E = tl.constexpr(1.4426950408889634)
LANES, TURNS = 2048, 4
"""Logits that a program of 16 warps takes at a time: 16 bytes of float32 a thread, four times."""


@triton.jit
def _order(x):
    """int64 that orders as the float32 `x` does (-0 just below 0)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, start, vocab, TURNS: tl.constexpr, LANES: tl.constexpr):
    """The next TURNS * LANES logits and their columns; -inf beyond the row."""
    column = start + tl.arange(0, TURNS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return tl.load(logits + column, mask=column < vocab, other=-INFINITY), column


@triton.jit
def _mass(logits, vocab, value, top, inverse, TURNS: tl.constexpr, LANES: tl.constexpr):
    """Mass, relative to the largest logit's, of the logits from `value` on."""
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, TURNS * LANES):
        x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
        total += tl.sum(tl.where(x >= value, tl.exp2(tl.minimum(x - top, 0.0) * inverse), 0.0), 0)
    return tl.sum(total, 0)


@triton.jit
def _largest(
    logits,
    vocab,
    low,  # a value that reaches what is needed, or the result where none does
    needed,
    top,
    inverse,
    BY_MASS: tl.constexpr,
    TURNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest value from which on the number, or mass, of the logits reaches what is needed."""
    reaches = _order(low)
    fails = _order(top * 0 + INFINITY) + 1
    while fails - reaches > 1:
        width = fails - reaches
        first, second = reaches + (width + 3) // 4, reaches + (width + 1) // 2
        third = tl.minimum(reaches + (3 * width + 3) // 4, fails - 1)
        at_first = tl.zeros([LANES], tl.float32)
        at_second = tl.zeros([LANES], tl.float32)
        at_third = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab, TURNS * LANES):
            x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
            part = tl.exp2(tl.minimum(x - top, 0.0) * inverse) if BY_MASS else 1.0
            at_first += tl.sum(tl.where(x >= _float(first), part, 0.0), 0)
            at_second += tl.sum(tl.where(x >= _float(second), part, 0.0), 0)
            at_third += tl.sum(tl.where(x >= _float(third), part, 0.0), 0)
        first_reaches = tl.sum(at_first, 0) >= needed
        second_reaches = tl.sum(at_second, 0) >= needed
        third_reaches = tl.sum(at_third, 0) >= needed
        fails = tl.where(first_reaches, tl.where(second_reaches, tl.where(third_reaches, fails, third), second), first)
        reaches = tl.where(
            third_reaches, third, tl.where(second_reaches, second, tl.where(first_reaches, first, reaches))
        )
    return _float(reaches)


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
        largest = tl.full([LANES], -INFINITY, tl.float32)
        for start in range(0, vocab, TURNS * LANES):
            x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
            largest = tl.maximum(largest, maximum_or_nan(x, 0), propagate_nan=tl.PropagateNan.ALL)
        top = tl.minimum(maximum_or_nan(largest, 0), MAX_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        if top > -INFINITY:
            inverse = tl.minimum(_LOG2_E / temperature, MAX_FLOAT)
            if log_min_p > -INFINITY:
                lowest = tl.full([LANES], INFINITY, tl.float32)
                for start in range(0, vocab, TURNS * LANES):
                    x = _load(logits, start, vocab, TURNS, LANES)[0].to(tl.float32)
                    kept = tl.div_rn(x - top, temperature + x * 0) >= log_min_p
                    lowest = tl.minimum(lowest, tl.min(tl.where(kept, x, INFINITY), 0))
                threshold = tl.minimum(tl.min(lowest, 0), top)
            if top_k > 0:
                threshold = _largest(logits, vocab, threshold, top_k, top, inverse, False, TURNS, LANES)
            if top_p < 1:
                needed = top_p * _mass(logits, vocab, threshold, top, inverse, TURNS, LANES)
                threshold = _largest(logits, vocab, threshold, needed, top, inverse, True, TURNS, LANES)
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
