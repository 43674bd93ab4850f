"""Launches of paged attention."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftwire_kernels.gpu.paged_attention import Heads, Sequences, Shares, attention_kernel, combine_kernel
from draftwire_kernels.gpu.paged_attention_plan import Launch, Problem, Tuning, plan, power_of_2
from draftwire_kernels.ragged_batch import BLOCK_SIZE, RaggedBatch

_SHARES_AT_ONCE = 8


class Mask(NamedTuple):
    """Mask and soft-cap, see `draftwire_kernels.paged_attention`."""

    causal: bool
    anchored: bool
    softcap: float | None


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
    anchored: bool,
    short: Tuning | None = None,
    long: Tuning | None = None,
) -> Tensor:
    num_rows, heads, size = query.shape
    kv_heads, size_v = value.shape[1:]
    if max(size, size_v) > 256:
        raise ValueError(f"query: got heads of {max(size, size_v)} elements, expected at most 256")
    if heads > 128 * kv_heads:
        raise ValueError(f"query: got {heads} heads, expected at most 128 for each of key's {kv_heads}")
    out = query.new_empty(num_rows, heads, size_v)
    if num_rows == 0:
        return out
    problem = Problem(
        num_rows=num_rows,
        num_sequences=batch.num_sequences,
        max_rows=batch.max_rows,
        max_length=batch.max_length,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        size=max(size, size_v),
        itemsize=query.itemsize,
        window=window,
    )
    with torch.cuda.device(query.device if query.is_cuda else -1):
        for launch in plan(problem, multiprocessors(query.device), short, long):
            shares = _shares(launch, out) if launch.most_shares > 1 else None
            mask = Mask(causal, anchored, softcap)
            _attend(query, key, value, keys, values, batch, out, problem, launch, shares, scale, mask)
            if shares is not None:
                _combine(batch, out, problem, launch, shares)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    problem: Problem,
    launch: Launch,
    shares: Shares | None,
    scale: float,
    mask: Mask,
) -> None:
    tuning, overlap = launch.tuning, overlaps(out.device)
    size, size_v = keys.shape[2], values.shape[2]
    first_axis, *other_axes = launch.grid
    attention_kernel[(first_axis * problem.kv_heads, *other_axes)](
        _heads(query),
        _heads(key),
        _heads(value),
        keys,
        values,
        out,
        Sequences(batch.slot_mapping, batch.cu_rows, batch.lengths, batch.block_tables),
        batch.block_tables.stride(0),
        problem.num_rows,
        problem.num_sequences,
        launch.least_rows,
        launch.most_rows,
        launch.most_shares,
        launch.fill,
        launch.most_steps,
        shares,
        launch.rows_each,
        scale,
        problem.window,
        mask.softcap,
        KV_HEADS=problem.kv_heads,
        GROUP=problem.group,
        D=size,
        DV=size_v,
        BLOCK_B=_block_of_sequences(problem) if launch.is_searched else 0,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_D=_block(size),
        BLOCK_DV=_block(size_v),
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_WIDTH=power_of_2(problem.group * size_v),
        BLOCK_NEW=_block(launch.most_rows if launch.is_short else tuning.block_m // problem.group),
        ALL_NEW=launch.is_short,
        CAUSAL=mask.causal,
        ANCHORED=mask.anchored,
        SEARCHED=launch.is_searched,
        WIDE=max(keys.numel(), values.numel(), problem.num_rows * max(key.stride(0), value.stride(0))) >= 2**31,
        STAGES=tuning.stages,
        OVERLAP=overlap,
        num_warps=tuning.warps,
        launch_pdl=overlap,
    )


def _combine(batch: RaggedBatch, out: Tensor, problem: Problem, launch: Launch, shares: Shares) -> None:
    heads, overlap = problem.kv_heads * problem.group, overlaps(out.device)
    heads_each = launch.heads_combined_by_a_program(problem)
    block_dv = _block(out.shape[2])
    combine_kernel[(problem.num_rows, heads // heads_each)](
        out,
        batch.cu_rows,
        batch.lengths,
        problem.num_sequences,
        launch.least_rows,
        launch.most_rows,
        launch.most_shares,
        launch.fill,
        launch.most_steps,
        shares,
        launch.rows_each,
        problem.window,
        heads_each,
        HEADS=heads,
        DV=out.shape[2],
        BLOCK_B=_block_of_sequences(problem),
        BLOCK_N=launch.tuning.block_n,
        BLOCK_DV=block_dv,
        BLOCK_SHARES=_block(launch.tuning.most_shares),
        AT_ONCE=_SHARES_AT_ONCE,
        OVERLAP=overlap,
        num_warps=max(1, block_dv * _SHARES_AT_ONCE // 1024),
        launch_pdl=overlap,
    )


def _shares(launch: Launch, out: Tensor) -> Shares:
    shape = (launch.num_shared_rows, out.shape[1], launch.most_shares)
    sums, tops, masses = (
        torch.empty(*shape, *size, dtype=torch.float32, device=out.device) for size in ((out.shape[2],), (), ())
    )
    return Shares(sums, tops, masses)


def _block(size: int) -> int:
    """Round a size up to one of few sizes, because kernels are compiled for each."""
    return max(power_of_2(size), 16)


def _block_of_sequences(problem: Problem) -> int:
    """Round a number of sequences up to one of few sizes; reading 64 first rows costs as much as one."""
    size = 64
    while size < problem.num_sequences:
        size *= 4
    return size


def _heads(x: Tensor) -> Heads:
    if x.stride(2) != 1:
        x = x.contiguous()
    return Heads(x, x.stride(0), x.stride(1))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Return whether a launch may begin before the previous one ends (Hopper and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
