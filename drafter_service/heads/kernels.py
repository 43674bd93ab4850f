"""The small operations of a head's layer, one launch each; `drafter_service.heads.operations` documents them.

Sums are float32; values are rounded to the tensors' dtype where the torch reference rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ACTIVATION_BLOCK = 1024


@triton.jit
def _normed(x, weight, inside, size, eps):
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    rounded = (wide * scale).to(x.dtype).to(tl.float32)
    return rounded * tl.load(weight, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_kernel(x, x_stride, added, added_stride, total, weight, out, size, eps, BLOCK: tl.constexpr):
    """Compute an RMS norm. Grid: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if added is not None:
        other = tl.load(added + row * added_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + row * size + column, value, mask=inside)
    tl.store(out + row * size + column, _normed(value, weight + column, inside, size, eps), mask=inside)


@triton.jit
def _first_input_kernel(
    tokens, embedding, embedding_weight, g, g_stride, g_weight, out, size, eps_embedding, eps_g, BLOCK: tl.constexpr
):
    """Grid: two programs a row, for the embedding's half and the state's half."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    out += row * 2 * size + column
    if tl.program_id(1) == 0:
        value = tl.load(embedding + tl.load(tokens + row) * size + column, mask=inside, other=0.0)
        tl.store(out, _normed(value, embedding_weight + column, inside, size, eps_embedding), mask=inside)
    else:
        value = tl.load(g + row * g_stride + column, mask=inside, other=0.0)
        tl.store(out + size, _normed(value, g_weight + column, inside, size, eps_g), mask=inside)


@triton.jit
def _rotate_kernel(
    x,  # [T, H, 2 * half], changed in place
    row_stride,
    positions,  # [T] int64
    cosines,  # [positions, half]
    sines,
    q_weight,  # [2 * half], or None: not normed
    k_weight,
    num_q_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate in place. Grid: one program a row and head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    place = x + row * row_stride + head * 2 * HALF + column
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0)
    if q_weight is not None:
        weight = q_weight if head < num_q_heads else k_weight
        wide, wide_2 = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide + wide_2 * wide_2, 0) / (2 * HALF) + eps)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        w_2 = tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)
        first = ((wide * scale).to(first.dtype).to(tl.float32) * w).to(first.dtype)
        second = ((wide_2 * scale).to(first.dtype).to(tl.float32) * w_2).to(first.dtype)
    angle = tl.load(positions + row) * HALF + column
    cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    tl.store(place, first * cosine - second * sine, mask=inside)
    tl.store(place + HALF, second * cosine + first * sine, mask=inside)


@triton.jit
def _store_keys_kernel(
    kv,  # [T, 2, KV, 2 * half]
    row_stride,
    positions,  # [T] int64
    slots,  # [T] int64
    cosines,  # [positions, half]
    sines,
    weight,  # [2 * half], or None: not normed
    keys,  # [cache slots, KV, 2 * half]
    values,
    num_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write keys to the cache. Grid: one program a row and key-value head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    place = kv + row * row_stride + head * 2 * HALF + column
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0)
    if weight is not None:
        wide, wide_2 = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide + wide_2 * wide_2, 0) / (2 * HALF) + eps)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        w_2 = tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)
        first = ((wide * scale).to(first.dtype).to(tl.float32) * w).to(first.dtype)
        second = ((wide_2 * scale).to(second.dtype).to(tl.float32) * w_2).to(second.dtype)
    angle = tl.load(positions + row) * HALF + column
    cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    to = (tl.load(slots + row) * num_heads + head) * 2 * HALF + column
    tl.store(keys + to, first * cosine - second * sine, mask=inside)
    tl.store(keys + to + HALF, second * cosine + first * sine, mask=inside)
    from_values = place + num_heads * 2 * HALF
    tl.store(values + to, tl.load(from_values, mask=inside, other=0.0), mask=inside)
    tl.store(values + to + HALF, tl.load(from_values + HALF, mask=inside, other=0.0), mask=inside)


@triton.jit
def _silu_mul_kernel(x, out, size, BLOCK: tl.constexpr):
    """Compute silu(gate) * up. Grid: one program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, activated * up.to(tl.float32), mask=inside)


@triton.jit
def _quantise_kernel(x, out, size, scale, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Convert to float8. Grid: one program for BLOCK elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) / scale
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x, added, total, weight, out, eps)
    return total, out


def _launch_norm(
    x: Tensor, added: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor, eps: float
) -> None:
    rows, size = x.shape
    if rows:
        added_stride = 0 if added is None else added.stride(0)
        block = triton.next_power_of_2(size)
        _norm_kernel[(rows,)](
            x, x.stride(0), added, added_stride, total, weight, out, size, eps, BLOCK=block, num_warps=_warps(block)
        )


def first_input(
    tokens: Tensor, embedding: Tensor, embedding_norm: tuple[Tensor, float], g: Tensor, g_norm: tuple[Tensor, float]
) -> Tensor:
    rows, size = g.shape
    out = torch.empty(rows, 2 * size, dtype=g.dtype, device=g.device)
    (embedding_weight, embedding_eps), (g_weight, g_eps) = embedding_norm, g_norm
    if rows:
        block = triton.next_power_of_2(size)
        _first_input_kernel[(rows, 2)](
            tokens, embedding, embedding_weight, g, g.stride(0), g_weight, out, size, embedding_eps, g_eps,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def rotate_(
    x: Tensor,
    num_q_heads: int,
    positions: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    rows, heads, size = x.shape
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    if rows:
        _rotate_kernel[(rows, heads)](
            x, x.stride(0), positions, cosines, sines, q_weight, k_weight, num_q_heads, eps,
            HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
        )  # fmt: skip


def store_keys_(
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norm: tuple[Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    rows, _, heads, size = kv.shape
    weight, eps = norm or (None, 0.0)
    if rows:
        _store_keys_kernel[(rows, heads)](
            kv, kv.stride(0), positions, slots, cosines, sines, weight, keys, values, heads, eps,
            HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
        )  # fmt: skip


def silu_mul(x: Tensor) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(size, _ACTIVATION_BLOCK))
        _silu_mul_kernel[grid](x, out, size, BLOCK=_ACTIVATION_BLOCK, num_warps=4)
    return out


def quantise(x: Tensor, scale: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if x.numel():
        grid, largest = (triton.cdiv(x.numel(), _ACTIVATION_BLOCK),), torch.finfo(out.dtype).max
        _quantise_kernel[grid](x, out, x.numel(), scale, LARGEST=largest, BLOCK=_ACTIVATION_BLOCK, num_warps=4)
    return out


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
