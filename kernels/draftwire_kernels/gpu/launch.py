"""Shapes of the launches, and the launches themselves."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from draftwire_kernels.gpu.batch import Batch, Draft, Output, Scratch
from draftwire_kernels.gpu.block import block_kernel
from draftwire_kernels.gpu.gumbel import gumbel_kernel
from draftwire_kernels.gpu.verify import verify_kernel
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys

@dataclass(frozen=True)
class Tuning:
    """What may be chosen without changing a result."""

    programs: int = 1056
    """Rows of a launch are split until it has about so many programs: eight for each multiprocessor of an H200."""
    rows_at_once: int | None = None
    """Rows of a request that one launch reads; by default all for few requests, one by one for many."""
    tile: int = 4
    """Groups that a program takes at a time, one for each of its warps."""
    group: int = 1024
    """Tokens of a group in a large vocabulary."""


@dataclass(frozen=True)
class _Shape:
    """How rows of `columns` logits are cut into groups, tiles and splits."""

    group: int
    num_groups: int
    num_splits: int
    tile: int

    @classmethod
    def of(cls, columns: int, rows: int, tuning: Tuning) -> "_Shape":
        group = tuning.group if columns >= 16384 else 128
        tiles = triton.cdiv(columns, group * tuning.tile)
        splits = max(1, min(triton.cdiv(tuning.programs, max(rows, 1)), tiles, 64))
        return cls(group, triton.cdiv(columns, group), triton.cdiv(tiles, triton.cdiv(tiles, splits)), tuning.tile)

    def turns(self, columns: int, group: int = 0) -> int:
        return triton.cdiv(triton.cdiv(columns, (group or self.group) * self.tile), self.num_splits)


def _power(count: int) -> int:
    return triton.next_power_of_2(max(count, 1))


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    draft_offset: Tensor | int,
    token_ids: Tensor | None,
    use_fp64: bool,
    tuning: Tuning | None = None,
) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    tuning = tuning or Tuning()
    logits = _unit_stride(logits)
    shape = _Shape.of(vocab, rows, tuning)
    floats = logits.new_empty(rows, 2 * shape.num_groups + shape.num_splits, dtype=torch.float32).flatten()
    group_top, group_floor, part_top = floats.split(
        [rows * shape.num_groups, rows * shape.num_groups, rows * shape.num_splits]
    )
    same = isinstance(draft_offset, int)
    with _on(logits):
        gumbel_kernel[(rows * shape.num_splits,)](
            logits,
            logits.stride(0),
            vocab,
            temperature.contiguous(),
            key.contiguous(),
            position.contiguous(),
            None if same else draft_offset.contiguous(),  # type: ignore[union-attr]
            draft_offset if same else 0,
            token_ids if token_ids is None else token_ids.contiguous(),
            group_top,
            group_floor,
            shape.num_groups,
            part_top,
            torch.empty(rows * shape.num_splits, dtype=torch.int32, device=logits.device),
            shape.num_splits,
            torch.zeros(rows, dtype=torch.int32, device=logits.device),
            tokens,
            USE_FP64=use_fp64,
            TILE=shape.tile,
            GROUP=shape.group,
            GROUPS=_power(shape.num_groups),
            TURNS=shape.turns(vocab),
            SPLITS=_power(shape.num_splits),
            num_warps=shape.tile,
        )
    return tokens


def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    keys: StreamKeys,
    position: Tensor,
    draft_logits: DraftLogits | None,
    method: str,
    synthetic_rates: Tensor | None,
    use_fp64: bool,
    tuning: Tuning | None = None,
) -> RejectionResult:
    tuning = tuning or Tuning()
    num_rows, vocab = target_logits.shape
    num_requests = cu_rows.shape[0] - 1
    device = target_logits.device
    sizes = _sizes(cu_rows)
    most_rows = max(sizes)
    if method == "block" and draft_logits is None:
        method = "standard"
    if num_rows == num_requests:
        draft_logits = None
    on_device = None if min(sizes) == most_rows else _to_device(cu_rows, device)
    target_logits = _unit_stride(target_logits)

    at_once = tuning.rows_at_once or (most_rows if num_requests <= 48 else 1)
    if method == "block":
        at_once = most_rows
    at_once = min(at_once, most_rows)
    shape = _Shape.of(vocab, num_requests * at_once, tuning)
    launches = triton.cdiv(most_rows, at_once)
    tests = most_rows - 2 if method == "block" else 0

    def buffer(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    masses = torch.float64 if use_fp64 else torch.float32
    num_drafts = num_rows - num_requests if draft_logits is not None else 0
    counters = torch.zeros(launches + max(tests, 0) + 1, num_requests, dtype=torch.int32, device=device)
    scratch = Scratch(
        group_top=buffer(num_rows, shape.num_groups),
        group_floor=buffer(num_rows, shape.num_groups),
        num_groups=shape.num_groups,
        part_top=buffer(num_rows, shape.num_splits),
        part_mass=buffer(num_rows, shape.num_splits, dtype=masses),
        draft_top=buffer(num_drafts, shape.num_splits) if draft_logits is not None else None,
        draft_mass=buffer(num_drafts, shape.num_splits, dtype=masses) if draft_logits is not None else None,
        draft_token_mass=buffer(num_drafts, shape.num_splits, dtype=masses) if draft_logits is not None else None,
        num_splits=shape.num_splits,
        arrived=counters[1:],
        done=counters[0],
        tested=buffer(num_requests, dtype=torch.int32) if method == "block" else None,
        weight=buffer(num_rows, dtype=masses) if method == "block" else None,
    )
    tokens = buffer(num_requests, most_rows, dtype=torch.int64)
    out = Output(tokens, most_rows, buffer(num_requests, dtype=torch.int32))
    batch = Batch(
        logits=target_logits,
        logits_stride=target_logits.stride(0),
        vocab=vocab,
        draft_tokens=draft_tokens.contiguous(),
        cu_rows=on_device,
        rows_each=most_rows,
        temperature=temperature.contiguous(),
        accept=keys.accept.contiguous(),
        resample=keys.resample.contiguous(),
        position=position.contiguous(),
        rates=None if synthetic_rates is None else synthetic_rates.contiguous(),
    )
    draft = _draft(draft_logits)
    width = vocab if draft_logits is None else draft_logits.logits.shape[1]
    list_size = min(max(_power(width), 16), 1024)
    draft_group = min(max(_power(width) // shape.tile, 32), shape.group)
    constants = {
        "USE_FP64": use_fp64,
        "TILE": shape.tile,
        "GROUP": shape.group,
        "GROUPS": _power(shape.num_groups),
        "TURNS": shape.turns(vocab),
        "LIST": list_size,
        "LISTS": triton.cdiv(width, list_size),
        "ROWS": _power(at_once),
        "SPLITS": _power(shape.num_splits),
        "WIDTH": _power(most_rows),
        "num_warps": shape.tile,
    }
    with _on(target_logits):
        for launch in range(launches):
            begin = launch * at_once
            count = min(at_once, most_rows - begin)
            verify_kernel[(num_requests * count * shape.num_splits,)](
                batch,
                draft,
                scratch,
                out,
                num_requests,
                begin,
                count,
                launch,
                METHOD=method,
                HAS_DRAFT_LOGITS=draft_logits is not None,
                DRAFT_GROUP=draft_group,
                DRAFT_TURNS=shape.turns(width, draft_group),
                **constants,
            )
        if method == "block":
            mass_parts = buffer(num_requests, shape.num_splits, dtype=masses)
            for test in range(tests):
                block_kernel[(num_requests * shape.num_splits,)](
                    batch, draft, scratch, out, mass_parts, num_requests, launches + test, most_rows, **constants
                )
    return RejectionResult(tokens, out.num_emitted)


def _sizes(cu_rows: Tensor) -> list[int]:
    """Rows of each request. Waits for the device when `cu_rows` lies on it, which a graph's capture cannot."""
    if cu_rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("cu_rows: got a tensor on the device while a CUDA graph is captured, expected one on the CPU")
    return cu_rows.diff().tolist()


def _to_device(cu_rows: Tensor, device: torch.device) -> Tensor:
    if not cu_rows.is_cuda and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if not cu_rows.is_pinned():
            raise ValueError(
                "cu_rows: got ragged requests in pageable memory while a CUDA graph is captured, expected pinned memory"
            )
    return cu_rows.to(device, non_blocking=True)


def _draft(draft_logits: DraftLogits | None) -> Draft:
    if draft_logits is None:
        return Draft(None, 0, None, 0, 0)
    logits, ids = _unit_stride(draft_logits.logits), draft_logits.token_ids
    if ids is not None:
        ids = _unit_stride(ids)
    stride = ids.stride(0) if ids is not None and ids.ndim == 2 else 0
    return Draft(logits, logits.stride(0), ids, stride, logits.shape[1])


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(x: Tensor) -> torch.cuda.device:
    """Launches go to the device of `x` (nothing to do on the CPU)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
