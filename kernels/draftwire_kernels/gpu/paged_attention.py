"""Attention over a paged cache, which also writes the batch's rows into the cache.

A work item is a tile of BLOCK_M pairs (row, head) of one sequence that share a key-value head, so that grouped heads
read the context once, and a share of the cached context; the last share also has the batch's own rows. A second launch
combines the shares of sequences with several (online softmax: Milakov and Gimelshein, 1805.02867; split context:
Flash-Decoding, Dao et al., 2023). New keys and values are read from the model's output, so no earlier launch needs to
write them into the cache. Grids depend on bounds known to the host; values on the device determine loop bounds and
early exits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
FAR = tl.constexpr(1 << 30)


class Heads(NamedTuple):
    """A tensor [T, heads, size] of unit stride in the last dimension."""

    data: Any
    row_stride: Any
    head_stride: Any


class Sequences(NamedTuple):
    """The tensors of a `RaggedBatch`."""

    slot_mapping: Any  # [T] int64
    cu_rows: Any  # [B + 1] int32
    lengths: Any  # [B] int32
    block_tables: Any  # [B, W] int32


class Shares(NamedTuple):
    """Results of the S shares of each row."""

    sums: Any  # [rows, H, S, Dv] float32, sums of weighted values
    tops: Any  # [rows, H, S] float32, largest scores in units of log 2
    masses: Any  # [rows, H, S] float32, sums of the weights


class Division(NamedTuple):
    """How the context of a sequence is divided into shares, depending only on its length and these bounds."""

    most_shares: Any
    fill: Any  # number of shares, unless a share would exceed most_steps
    most_steps: Any  # of BLOCK_N rows


@triton.jit
def _divide(division, start, window, BLOCK_N: tl.constexpr):
    """Return the first step over the rows cached before `start`, steps of a share, number of shares."""
    first_step = start * 0
    if window is not None:
        first_step = tl.maximum(start - window + 1, 0) // BLOCK_N
    steps = tl.maximum(tl.cdiv(start, BLOCK_N) - first_step, 1)
    of_share = tl.minimum(tl.cdiv(steps, division.fill), division.most_steps)
    of_share = tl.maximum(of_share, tl.cdiv(steps, division.most_shares))
    return first_step, of_share, tl.cdiv(steps, of_share)


@triton.jit
def _find(cu_rows, num_sequences, place, ROWS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the sequence of a row; with ROWS > 1 of a tile of ROWS rows: cu_rows[b] // ROWS + b tiles precede b's."""
    sequences = tl.arange(0, BLOCK_B)
    before = tl.load(cu_rows + sequences, mask=sequences < num_sequences, other=FAR)
    if ROWS > 1:
        before = before // ROWS + sequences
    return tl.sum((before <= place).to(tl.int32), 0) - 1


@triton.jit
def _load(rows, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load [N, BLOCK] from pointers [N]; zero for rows that are not inside (None: all are)."""
    d = tl.arange(0, BLOCK)[None, :]
    if inside is None and SIZE == BLOCK:
        loaded = tl.load(rows[:, None] + d)
    elif inside is None:
        loaded = tl.load(rows[:, None] + d, mask=d < SIZE, other=0.0)
    elif SIZE == BLOCK:
        loaded = tl.load(rows[:, None] + d, mask=inside[:, None], other=0.0)
    else:
        loaded = tl.load(rows[:, None] + d, mask=inside[:, None] & (d < SIZE), other=0.0)
    return loaded


@triton.jit
def _weigh(top, mass, acc, q, k, v, seen, scale, softcap):
    """Compute one step of the online softmax with keys masked by `seen` (None: no mask)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if softcap is None:
        to_log2 = scale * LOG2_E
    else:  # tanh(y) = 1 - 2 / (1 + exp(2 y))
        scores = 1 - 2 / (1 + tl.exp2(scores * (scale / softcap * 2 * LOG2_E)))
        to_log2 = softcap * LOG2_E
    if seen is not None:
        scores = tl.where(seen, scores, -INFINITY)
    new_top = tl.maximum(top, tl.max(scores, 1) * to_log2)
    base = tl.where(new_top == -INFINITY, 0.0, new_top)  # for rows without any keys so far
    weights = tl.exp2(scores * to_log2 - base[:, None])
    fade = tl.exp2(top - base)
    mass = mass * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def _attend_cached(
    top, mass, acc, q, position, keys, values, table, begin, end, start, scale, window, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the cached rows begin .. end - 1 of the sequence, which end before `start`."""
    n = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + n // BLOCK_SIZE, mask=n < start, other=0)
    for _ in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cached = n < start
        slot = block * BLOCK_SIZE + n % BLOCK_SIZE
        if WIDE:
            slot = slot.to(tl.int64)
        k = _load(keys + slot * (KV_HEADS * D), cached, D, BLOCK_D)
        v = _load(values + slot * (KV_HEADS * DV), cached, DV, BLOCK_DV)
        # One step ahead, which lengthens the pipeline of keys and values.
        block = tl.load(table + (n + BLOCK_N) // BLOCK_SIZE, mask=n + BLOCK_N < start, other=0)
        seen = cached[None, :]
        if window is not None:
            seen = seen & (n[None, :] > position[:, None] - window)
        top, mass, acc = _weigh(top, mass, acc, q, k, v, seen, scale, softcap)
        n += BLOCK_N
    return top, mass, acc


@triton.jit
def _attend_new(
    top, mass, acc, q, row, key, value, begin, end, count, scale, window, softcap,
    MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to new rows begin .. end - 1 of the sequence, causally with MASKED."""
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        inside = None
        seen = None
        if MASKED:
            inside = n < count
            seen = n[None, :] <= row[:, None]
            if window is not None:
                seen = seen & (n[None, :] > row[:, None] - window)
        at = n.to(tl.int64) if WIDE else n
        k = _load(key.data + at * key.row_stride, inside, D, BLOCK_D)
        v = _load(value.data + at * value.row_stride, inside, DV, BLOCK_DV)
        top, mass, acc = _weigh(top, mass, acc, q, k, v, seen, scale, softcap)
    return top, mass, acc


@triton.jit
def _write(cached, slots, rows, inside, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)[None, :]
    tl.store(cached + (slots * STRIDE)[:, None] + d, rows, mask=inside[:, None] & (d < SIZE))


@triton.jit
def _clear(out, first_row, num_rows, head, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to rows first_row .. num_rows - 1 of [T, KV_HEADS, WIDTH]."""
    column = tl.arange(0, BLOCK)
    to = out + (first_row.to(tl.int64) * KV_HEADS + head) * WIDTH + column
    for _ in range(first_row, num_rows):
        tl.store(to, tl.zeros([BLOCK], out.dtype.element_ty), mask=column < WIDTH)
        to += KV_HEADS * WIDTH


@triton.jit
def _shared_row(sequence, first_row, rows_each, row):
    """Return the index of a sequence's row in `Shares`, with rows_each rows per sequence, or with 0 the batch's."""
    return row + (first_row.to(tl.int64) if rows_each == 0 else sequence.to(tl.int64) * rows_each)


@triton.jit(
    do_not_specialize=["tables_stride", "num_rows", "num_sequences", "least_rows", "most_rows", "most_shares", "fill",
                       "most_steps", "rows_each", "window"]
)  # fmt: skip
def attention_kernel(
    query,
    key,
    value,
    keys,  # [slots, KV, D]
    values,  # [slots, KV, Dv]
    out,  # [T, H, Dv]
    batch,
    tables_stride,
    num_rows,
    num_sequences,
    least_rows,  # sequences with fewer or more rows belong to another launch
    most_rows,
    most_shares,
    fill,
    most_steps,
    shares,  # None for one share
    rows_each,
    scale,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_NEW: tl.constexpr,  # at least the new rows of a sequence with ALL_NEW, else those of a tile
    ALL_NEW: tl.constexpr,  # required without CAUSAL and with ANCHORED
    CAUSAL: tl.constexpr,
    ANCHORED: tl.constexpr,
    SEARCHED: tl.constexpr,
    WIDE: tl.constexpr,  # indices of the cache or the batch exceed 32 bits
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend to a share of a sequence's context.

    The grid is sequences (with SEARCHED tiles of all sequences) * KV_HEADS, tiles, shares.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    sequence = tl.program_id(0) // KV_HEADS
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    # Backwards, because the last tiles of a prompt have most keys, and later shares belong to long sequences.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    share = tl.num_programs(2) - 1 - tl.program_id(2)
    if SEARCHED:
        place = tl.num_programs(0) // KV_HEADS - 1 - sequence
        sequence = _find(batch.cu_rows, num_sequences, place, ROWS, BLOCK_B)
        tile = place - tl.load(batch.cu_rows + sequence) // ROWS - sequence
    first_row = tl.load(batch.cu_rows + sequence)
    next_row = tl.load(batch.cu_rows + sequence + 1)
    length = tl.load(batch.lengths + sequence)
    if (sequence == num_sequences - 1) & (tile == 0) & (share == 0):
        _clear(out, next_row, num_rows, head, KV_HEADS, GROUP * DV, BLOCK_WIDTH)
    count = next_row - first_row
    if (count < least_rows) | (count > most_rows) | (tile * ROWS >= count):
        return
    start = length - count
    division = Division(most_shares, fill, most_steps)
    first_step, of_share, num_shares = _divide(division, start, window, BLOCK_N)
    if share >= num_shares:
        return
    is_last = share == num_shares - 1

    # The tile's queries, and pointers to its head.
    m = tl.arange(0, BLOCK_M)
    row = tile * ROWS + m // GROUP
    valid = (m < ROWS * GROUP) & (row < count)
    first = first_row.to(tl.int64)
    q_head = head * GROUP + m % GROUP
    q = _load(query.data + (first + row) * query.row_stride + q_head * query.head_stride, valid, D, BLOCK_D)
    key = Heads(key.data + first * key.row_stride + head * key.head_stride, key.row_stride, 0)
    value = Heads(value.data + first * value.row_stride + head * value.head_stride, value.row_stride, 0)
    keys += head * D
    values += head * DV
    if ALL_NEW:  # few rows, loaded early
        new = tl.arange(0, BLOCK_NEW)
        inside = (new < count) & is_last
        k_new = _load(key.data + new * key.row_stride, inside, D, BLOCK_D)
        v_new = _load(value.data + new * value.row_stride, inside, DV, BLOCK_DV)

    top = tl.full([BLOCK_M], -INFINITY, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    begin = (first_step + share * of_share) * BLOCK_N
    end = tl.minimum(begin + of_share * BLOCK_N, start)
    first_position = start if ANCHORED else start + tile * ROWS
    position = start + row * 0 if ANCHORED else start + row
    if window is not None:
        begin = tl.maximum(begin, tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N)
    top, mass, acc = _attend_cached(
        top, mass, acc, q, position, keys, values, batch.block_tables + sequence.to(tl.int64) * tables_stride,
        begin, end, start, scale, window, softcap,
        KV_HEADS, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE, WIDE, STAGES,
    )  # fmt: skip
    if is_last:
        if ALL_NEW:
            seen = (new[None, :] < count) & (row[:, None] >= 0)
            if CAUSAL:
                seen = new[None, :] <= row[:, None]
            if window is not None and not ANCHORED:
                seen = seen & (new[None, :] > row[:, None] - window)
            top, mass, acc = _weigh(top, mass, acc, q, k_new, v_new, seen, scale, softcap)
            inside = (new < count) & ((tile + 1) * ROWS >= count)
        else:
            end = tl.minimum((tile + 1) * ROWS, count)
            if window is None:
                begin = (tile * ROWS + 1) // BLOCK_N * BLOCK_N
                top, mass, acc = _attend_new(
                    top, mass, acc, q, row, key, value, 0, begin, count, scale, window, softcap,
                    False, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, STAGES,
                )  # fmt: skip
            else:
                begin = tl.maximum(tile * ROWS - window + 1, 0) // BLOCK_N * BLOCK_N
            top, mass, acc = _attend_new(
                top, mass, acc, q, row, key, value, begin, end, count, scale, window, softcap,
                True, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, STAGES,
            )  # fmt: skip
            new = tile * ROWS + tl.arange(0, BLOCK_NEW)
            inside = new < end
            at = new.to(tl.int64) if WIDE else new
            k_new = _load(key.data + at * key.row_stride, inside, D, BLOCK_D)
            v_new = _load(value.data + at * value.row_stride, inside, DV, BLOCK_DV)
        slots = tl.load(batch.slot_mapping + first + new, mask=inside, other=0)
        _write(keys, slots, k_new, inside, KV_HEADS * D, D, BLOCK_D)
        _write(values, slots, v_new, inside, KV_HEADS * DV, DV, BLOCK_DV)

    dv = tl.arange(0, BLOCK_DV)[None, :]
    if num_shares == 1:
        acc *= (1 / tl.where(valid, mass, 1.0))[:, None]
        to = ((first + row) * HEADS + q_head) * DV
        tl.store(out + to[:, None] + dv, acc.to(out.dtype.element_ty), mask=valid[:, None] & (dv < DV))
    elif shares is not None:
        left = (_shared_row(sequence, first, rows_each, row) * HEADS + q_head) * most_shares + share
        tl.store(shares.sums + left[:, None] * DV + dv, acc, mask=valid[:, None] & (dv < DV))
        tl.store(shares.tops + left, top, mask=valid)
        tl.store(shares.masses + left, mass, mask=valid)


@triton.jit(
    do_not_specialize=["num_sequences", "least_rows", "most_rows", "most_shares", "fill", "most_steps", "rows_each",
                       "window", "heads_each"]
)  # fmt: skip
def combine_kernel(
    out,  # [T, H, Dv]
    cu_rows,
    lengths,
    num_sequences,
    least_rows,
    most_rows,
    most_shares,
    fill,
    most_steps,
    shares,
    rows_each,
    window,
    heads_each,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the shares of each row in a fixed order. The grid is rows, parts of heads_each heads."""
    row = tl.program_id(0)
    division = Division(most_shares, fill, most_steps)
    sequence = _find(cu_rows, num_sequences, row, 1, BLOCK_B)
    first_row, next_row = tl.load(cu_rows + sequence), tl.load(cu_rows + sequence + 1)
    count = next_row - first_row
    _, _, num_shares = _divide(division, tl.load(lengths + sequence) - count, window, BLOCK_N)
    if OVERLAP:
        gdc_wait()
    if (row >= next_row) | (count < least_rows) | (count > most_rows) | (num_shares == 1):
        return
    all_shares, few = tl.arange(0, BLOCK_SHARES), tl.arange(0, AT_ONCE)
    dv = tl.arange(0, BLOCK_DV)[None, :]
    shared_row = _shared_row(sequence, first_row, rows_each, row - first_row)
    for each in range(heads_each):
        head = tl.program_id(1) * heads_each + each
        first = (shared_row * HEADS + head) * most_shares
        there = all_shares < num_shares
        tops = tl.load(shares.tops + first + all_shares, mask=there, other=-INFINITY)
        masses = tl.load(shares.masses + first + all_shares, mask=there, other=0.0)
        top = tl.max(tops, 0)
        acc = tl.zeros([AT_ONCE, BLOCK_DV], tl.float32)
        for begin in range(0, num_shares, AT_ONCE):
            share = begin + few
            weights = tl.exp2(tl.load(shares.tops + first + share, mask=share < num_shares, other=-INFINITY) - top)
            inside = (share < num_shares)[:, None] & (dv < DV)
            acc += tl.load(shares.sums + (first + share)[:, None] * DV + dv, mask=inside, other=0.0) * weights[:, None]
        result = tl.sum(acc, 0)[None, :] / tl.sum(masses * tl.exp2(tops - top), 0)
        to = out + (row.to(tl.int64) * HEADS + head) * DV + dv
        tl.store(to, result.to(out.dtype.element_ty), mask=dv < DV)
