"""The structs of tensors that the verification kernels take, and where a request lies in them.

As arguments of a kernel the tensors arrive as pointers, and a field that is None as a compile-time constant.
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
    cu_rows: Any  # [B + 1] int32, or None when every request has `rows_each` rows
    rows_each: Any
    temperature: Any  # [B] float32
    accept: Any  # [B] int64
    resample: Any  # [B] int64
    position: Any  # [B] int64
    rates: Any  # [k] float32, or None


class Draft(NamedTuple):
    """Draft logits; without `token_ids` and `column_of` they are dense."""

    logits: Any  # [D, n] float32
    logits_stride: Any
    token_ids: Any  # [D, n] int64, when each row lists its own
    token_ids_stride: Any
    column_of: Any  # [V] int32, of a reduced vocabulary: the column of each target id, -1 for none
    width: Any


class Scratch(NamedTuple):
    """What programs hand to each other."""

    group_top: Any  # [R, G] float32
    lane_floor: Any  # [R, G, LANES] float32
    num_groups: Any
    part_top: Any  # [R, S] float32
    part_mass: Any  # [R, S] float32 or float64; at temperature 0 the index of the largest logit
    draft_top: Any  # [D, S] float32
    draft_mass: Any  # [D, S]
    draft_token_mass: Any  # [D, S]
    num_splits: Any
    arrived: Any  # [launches, B] int32, zero
    done: Any  # [B] int32, zero: the request's tokens are written
    block: Any  # `Block`, or None


class Block(NamedTuple):
    """What block verification leaves for its tests."""

    weight: Any  # [R] float32 or float64: weight of p after as many drafts
    statistics: Any  # [R, 4] of the same: top and mass of target and draft
    num_candidates: Any  # [B] int32
    candidates: Any  # [R] int32, a request's prefixes to test, the longest first
    mass: Any  # [B, count, S]


class Output(NamedTuple):
    tokens: Any  # [B, width] int64
    width: Any
    num_emitted: Any  # [B] int32


@triton.jit
def request_rows(batch, request):
    """First row, first draft and number of drafts of a request (int64, int64, int32)."""
    if batch.cu_rows is None:
        first_row = request.to(tl.int64) * batch.rows_each
        num_drafts = request * 0 + batch.rows_each - 1
    else:
        first_row = tl.load(batch.cu_rows + request).to(tl.int64)
        num_drafts = (tl.load(batch.cu_rows + request + 1) - first_row - 1).to(tl.int32)
    return first_row, first_row - request, num_drafts


@triton.jit
def is_last(arrived, expected):
    """Whether this program is the last of `expected` to get here; what the others stored is visible to it then."""
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == expected - 1


@triton.jit
def at(vector, index, place):
    """The entry of a small vector."""
    return tl.sum(tl.where(index == place, vector, 0), 0)


@triton.jit
def emit(batch, out, request, first_draft, accepted, token, WIDTH: tl.constexpr):
    """Writes a request's accepted drafts and the token after them, -1 for none."""
    place = tl.arange(0, WIDTH)
    drafts = tl.load(batch.draft_tokens + first_draft + place, mask=place < accepted, other=-1)
    tokens = tl.where(place == accepted, token.to(tl.int64), drafts)
    tl.store(out.tokens + request.to(tl.int64) * out.width + place, tokens, mask=place < out.width)
    tl.store(out.num_emitted + request, accepted + (token >= 0).to(tl.int32))
