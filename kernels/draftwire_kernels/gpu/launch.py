"""Shapes of the launches, and the launches themselves."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from draftwire_kernels.gpu.batch import Batch, Block, Draft, Output, Scratch
from draftwire_kernels.gpu.block import block_kernel
from draftwire_kernels.gpu.gumbel import gumbel_kernel
from draftwire_kernels.gpu.table import column_table
from draftwire_kernels.gpu.verify import verify_kernel
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys


@dataclass(frozen=True)
class Tuning:
    """What may be chosen without changing a result."""

    programs: int = 2112
    """Rows of a launch are split until it has about so many programs: sixteen for each multiprocessor of an H200."""
    rows_at_once: int | None = None
    """Rows of a request that one launch reads; by default all for few requests, half of them for many."""
    tests_at_once: int | None = None
    """Prefixes that one launch of block verification tests; by default all."""
    registers: int | None = 128
    """Most registers of a thread (float32 alone), so that 16 warps fit on a multiprocessor."""
    tile: int = 4
    """Groups that a program takes at a time, one for each of its warps."""
    group: int = 1024
    """Tokens of a group in a large vocabulary."""

    def limit(self, use_fp64: bool) -> dict[str, int]:
        return {} if self.registers is None or use_fp64 else {"maxnreg": self.registers}


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
    groups = rows * shape.num_groups
    floats = logits.new_empty(2 * groups + rows * shape.num_splits, dtype=torch.float32)
    lane_floor, group_top, part_top = floats.split([groups, groups, rows * shape.num_splits])
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
            lane_floor,
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
            **tuning.limit(use_fp64),
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

    at_once = tuning.rows_at_once or (most_rows if num_requests <= 64 else triton.cdiv(most_rows, 2))
    if method == "block":
        at_once = most_rows
    at_once = min(at_once, most_rows)
    shape = _Shape.of(vocab, num_requests * at_once, tuning)
    launches = triton.cdiv(most_rows, at_once)
    tests = max(most_rows - 2, 0)
    at_once_tested = max(min(tuning.tests_at_once or tests, tests), 1)
    test_launches = triton.cdiv(tests, at_once_tested) if method == "block" else 0

    def buffer(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    with _on(target_logits):
        draft = _draft(draft_logits, vocab)
    # Many candidates of p are refused before a residual's draw ends, so each may be looked at in small.
    lanes = 1 if draft.logits is None or draft.token_ids is not None else 32
    masses = torch.float64 if use_fp64 else torch.float32
    num_drafts = num_rows - num_requests if draft_logits is not None else 0
    counters = torch.zeros(launches + test_launches + 1, num_requests, dtype=torch.int32, device=device)
    block = None
    if method == "block":
        block = Block(
            weight=buffer(num_rows, dtype=masses),
            statistics=buffer(num_rows, 4, dtype=masses),
            num_candidates=buffer(num_requests, dtype=torch.int32),
            candidates=buffer(num_rows, dtype=torch.int32),
            mass=buffer(num_requests, at_once_tested, shape.num_splits, dtype=masses),
        )
    scratch = Scratch(
        group_top=buffer(num_rows, shape.num_groups),
        lane_floor=buffer(num_rows, shape.num_groups, lanes),
        num_groups=shape.num_groups,
        part_top=buffer(num_rows, shape.num_splits),
        part_mass=buffer(num_rows, shape.num_splits, dtype=masses),
        draft_top=buffer(num_drafts, shape.num_splits) if draft_logits is not None else None,
        draft_mass=buffer(num_drafts, shape.num_splits, dtype=masses) if draft_logits is not None else None,
        draft_token_mass=buffer(num_drafts, shape.num_splits, dtype=masses) if draft_logits is not None else None,
        num_splits=shape.num_splits,
        arrived=counters[1:],
        done=counters[0],
        block=block,
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
    width = vocab if draft_logits is None else draft_logits.logits.shape[1]
    list_size = min(max(_power(width), 16), 128)
    draft_group = min(max(_power(width) // shape.tile, 128), shape.group)
    constants = {
        "USE_FP64": use_fp64,
        "TILE": shape.tile,
        "GROUP": shape.group,
        "GROUPS": _power(shape.num_groups),
        "LANES": lanes,
        "TURNS": shape.turns(vocab),
        "LIST": list_size,
        "LISTS": 0 if draft.token_ids is None else triton.cdiv(width, list_size),
        "ROWS": _power(at_once),
        "SPLITS": _power(shape.num_splits),
        "WIDTH": _power(most_rows),
        "num_warps": shape.tile,
        **tuning.limit(use_fp64),
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
        for test in range(test_launches):
            block_kernel[(num_requests * at_once_tested * shape.num_splits,)](
                batch,
                draft,
                scratch,
                out,
                num_requests,
                launches + test,
                test * at_once_tested,
                most_rows,
                at_once_tested,
                COUNT=_power(at_once_tested),
                **constants,
            )
    return RejectionResult(tokens, out.num_emitted)


def _sizes(cu_rows: Tensor) -> list[int]:
    """Rows of each request. Waits for the device when `cu_rows` lies on it, which a graph's capture cannot."""
    if cu_rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("cu_rows: got a tensor on the device while a CUDA graph is captured, expected one on the CPU")
    return cu_rows.diff().tolist()


def _to_device(cu_rows: Tensor, device: torch.device) -> Tensor:
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured and not cu_rows.is_pinned():
        raise ValueError(
            "cu_rows: got ragged requests in pageable memory while a CUDA graph is captured, expected pinned memory"
        )
    return cu_rows.to(device, non_blocking=True)


def _draft(draft_logits: DraftLogits | None, vocab: int) -> Draft:
    if draft_logits is None:
        return Draft(None, 0, None, 0, None, 0)
    logits, ids = _unit_stride(draft_logits.logits), draft_logits.token_ids
    width = logits.shape[1]
    if ids is None or ids.ndim == 1:
        table = None if ids is None else column_table(ids, vocab)
        return Draft(logits, logits.stride(0), None, 0, table, width)
    ids = _unit_stride(ids)
    return Draft(logits, logits.stride(0), ids, ids.stride(0), None, width)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(x: Tensor) -> torch.cuda.device:
    """Launches go to the device of `x` (nothing to do on the CPU)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
