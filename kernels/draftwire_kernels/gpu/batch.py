"""Structs of tensors for the verification kernels, and the location of a request in them.

In a kernel the tensors are pointers, and a field that is None is a compile-time constant.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Batch(NamedTuple):
    """Target side of a ragged batch: B requests, R rows, D = R - B drafts."""

    logits: Any  # [R, V]
    logits_stride: Any
    vocab: Any
    draft_tokens: Any  # [D] int64
    cu_rows: Any  # [B + 1] int32, or None if every request has `rows_each` rows
    rows_each: Any
    temperature: Any  # [B] float32
    accept: Any  # [B] int64
    resample: Any  # [B] int64
    position: Any  # [B] int64
    rates: Any  # [k, num_rates] float32, or None
    num_rates: Any  # a power of two


class Draft(NamedTuple):
    """Draft logits; without `token_ids` and `column_of` they are dense."""

    logits: Any  # [D, n] float32
    logits_stride: Any
    token_ids: Any  # [D, n] int64, if each row has its own ids
    token_ids_stride: Any
    column_of: Any  # [V] int32, of a reduced vocabulary: column of each target id, -1 for none
    width: Any


class Scratch(NamedTuple):
    """Intermediate results that programs pass to each other."""

    group_top: Any  # [R, G] float32, the largest logit of each group
    group_mass: Any  # [R, G] float32, relative to group_top; leads of `scan_sampled` for "coupled"; None for "block"
    num_groups: Any
    part_top: Any  # [R, P] float32, of P parts of a row, only for block verification
    part_mass: Any  # [R, P] float32 or float64
    draft_top: Any  # [D, P], like part_top, of dense draft logits
    draft_mass: Any  # [D, P], like part_mass
    waves: Any  # `Waves`
    block: Any  # `Block`, or None


class Waves(NamedTuple):
    """A request's rows are processed in waves; each wave except the last may find nothing to emit.

    Programs of a wave come after those of earlier waves in the grid, and skip their rows if an earlier wave has
    decided. No program waits for another: the last program of a wave closes and decides the wave, and the program that
    completes the first deciding wave and all waves before it writes the tokens. So the result depends only on the rows,
    and not on the order of arrival.
    """

    arrived: Any  # [W, B] int32, zero before and after: finished programs of each wave
    state: Any  # [B] int64, zero before and after: bits of closed waves, and of deciding waves 32 places higher
    decision: Any  # [B, W, 2] int32: accepted drafts, next token


class Block(NamedTuple):
    """Results of the first launch of block verification for the second launch."""

    weight: Any  # [R] float32 or float64: weight of p after the row's number of drafts
    statistics: Any  # [R, 4] of the same dtype: top and mass of target and draft
    prefixes: Any  # [B] int32, bits of the prefixes that may be accepted, 0 if the tokens are written
    group_mass: Any  # [R, G] float32, upper bounds of the residuals' masses
    part_mass: Any  # [R, P], P parts of a row in the second launch


class Output(NamedTuple):
    tokens: Any  # [B, width] int64
    width: Any
    num_emitted: Any  # [B] int32


@triton.jit
def request_rows(batch, request):
    """Return the first row, first draft and number of drafts of a request (int64, int64, int32)."""
    if batch.cu_rows is None:
        first_row = request.to(tl.int64) * batch.rows_each
        num_drafts = request * 0 + batch.rows_each - 1
    else:
        first_row = tl.load(batch.cu_rows + request).to(tl.int64)
        num_drafts = (tl.load(batch.cu_rows + request + 1) - first_row - 1).to(tl.int32)
    return first_row, first_row - request, num_drafts


@triton.jit
def is_last(arrived, expected):
    """Return whether this program is the last of `expected`; the last one resets the counter.

    The last program can read the others' stores with ".cg" loads, which bypass the first-level cache.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = before == expected - 1
    tl.store(arrived, 0, mask=last)
    return last


@triton.jit
def highest_bit(bits):
    """Return the place of the highest bit of an int32 below 2**24, -127 for 0."""
    return (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def is_decided_before(waves, request, wave):
    """Return whether an earlier wave is known to have decided; the answer may be late, but never wrong.

    Reads with an atomic, which one thread performs for the whole program: with plain loads, two warps could read
    different values, and a branch would diverge before the next barrier.
    """
    decided = tl.atomic_add(waves.state + request, 0, mask=wave > 0, sem="relaxed", scope="gpu") >> 32
    return (decided & ((1 << wave) - 1)) != 0


@triton.jit
def announce(waves, request, wave, is_decided):
    """Publish that this wave decides, before its token is sampled."""
    bit = tl.full([], 1, tl.int64) << (wave + 32)
    tl.atomic_or(waves.state + request, bit, mask=is_decided, sem="relaxed", scope="gpu")


@triton.jit
def first_decision(state):
    """Return the first wave that has decided, if it and all earlier waves are closed; else -1."""
    closed = (state & 0x7FFFFFFF).to(tl.int32)
    decided = (state >> 32).to(tl.int32)
    first = highest_bit(decided & -decided)
    needed = (2 << tl.maximum(first, 0)) - 1
    return tl.where((decided != 0) & ((closed & needed) == needed), first, -1)


@triton.jit
def close_wave(waves, out, request, drafts, wave, num_waves, accepted, token, decided, WAVES: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Record a wave's decision; write the request's tokens if they are now determined (see `Waves`)."""
    if WAVES == 1:
        emit(out, request, drafts, accepted, token, WIDTH)
    else:
        decisions = waves.decision + request.to(tl.int64) * (2 * WAVES)
        tl.store(decisions + 2 * wave, accepted)
        tl.store(decisions + 2 * wave + 1, token)
        one = tl.full([], 1, tl.int64)
        bits = (one << wave) | (decided.to(tl.int64) << (wave + 32))
        tl.debug_barrier()
        before = tl.atomic_or(waves.state + request, bits, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        deciding = first_decision(before | bits)
        if (deciding >= 0) & (first_decision(before) < 0):
            if deciding != wave:
                accepted = tl.load(decisions + 2 * deciding, cache_modifier=".cg")
                token = tl.load(decisions + 2 * deciding + 1, cache_modifier=".cg")
            emit(out, request, drafts, accepted, token, WIDTH)
        closed = (before | bits) & 0x7FFFFFFF
        tl.store(waves.state + request, 0, mask=closed == (one << num_waves) - 1)


@triton.jit
def at(vector, index, place):
    """Return the entry of a small vector."""
    return tl.sum(tl.where(index == place, vector, 0), 0)


@triton.jit
def load_drafts(batch, request, WIDTH: tl.constexpr):
    """Return the drafts of a request [WIDTH], padded with -1."""
    _, first_draft, num_drafts = request_rows(batch, request)
    place = tl.arange(0, WIDTH)
    return tl.load(batch.draft_tokens + first_draft + place, mask=place < num_drafts, other=-1)


@triton.jit
def emit(out, request, drafts, accepted, token, WIDTH: tl.constexpr):
    """Write a request's accepted drafts and the next token, -1 for none."""
    place = tl.arange(0, WIDTH)
    tokens = tl.where(place < accepted, drafts, tl.where(place == accepted, token.to(tl.int64), -1))
    tl.store(out.tokens + request.to(tl.int64) * out.width + place, tokens, mask=place < out.width)
    tl.store(out.num_emitted + request, accepted + (token >= 0).to(tl.int32))
