"""Launches of the sampling kernels: buffers and compile-time constants."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from draftwire_kernels.gpu import counters, tuning
from draftwire_kernels.gpu.batch import Batch, Block, Draft, Output, Scratch, Waves
from draftwire_kernels.gpu.block import block_kernel
from draftwire_kernels.gpu.gumbel import gumbel_kernel
from draftwire_kernels.gpu.table import column_table
from draftwire_kernels.gpu.tuning import WARPS, Shape, Tuning
from draftwire_kernels.gpu.verify import verify_kernel
from draftwire_kernels.noise import GROUP
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys

SAME_IN_ALL_THREADS: dict[str, Any] = {"enable_fp_fusion": False}
"""Many threads hold the result of a reduction. Fusing a product into its first addition, where threads have different
halves, would make the copies differ in the last bit, and a branch on them would diverge."""

MAX_WAVES = 24
"""Bits for the waves of a request in `gpu.batch`."""


def _power(count: int) -> int:
    return triton.next_power_of_2(max(count, 1))


def _capacity(count: int) -> int:
    """Return the compile-time size for `count` entries: one, or the same size for all small numbers, to share a
    kernel."""
    return 1 if count == 1 else max(_power(count), 8)


def _aligned(count: int) -> int:
    """Round 4-byte words up to a multiple of 16 bytes, because kernels are recompiled for unaligned pointers."""
    return -(-count // 4) * 4


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    draft_offset: Tensor | int,
    token_ids: Tensor | None,
    use_fp64: bool,
    chosen: Tuning | None = None,
) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    chosen = chosen or tuning.choose(tuning.GUMBEL, rows)
    logits = _unit_stride(logits)
    shape = Shape.of(vocab, logits.element_size(), rows, chosen)
    groups = _aligned(rows * shape.num_groups)
    group_top, group_lead = torch.empty(2, groups, dtype=torch.float32, device=logits.device)
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
            group_lead,
            shape.num_groups,
            counters.zeros(rows, logits.device),
            tokens,
            USE_FP64=use_fp64,
            TILE=chosen.tile,
            GROUP=shape.group,
            GROUPS=_power(shape.num_groups),
            LINE=shape.line,
            SPLITS=shape.num_splits,
            num_warps=WARPS,
            **SAME_IN_ALL_THREADS,
            **chosen.limit(use_fp64),
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
    chosen: Tuning | None = None,
) -> RejectionResult:
    num_rows, vocab = target_logits.shape
    num_requests = cu_rows.shape[0] - 1
    device = target_logits.device
    sizes = _sizes(cu_rows)
    most_rows = max(sizes)
    if num_rows == num_requests:
        draft_logits = None
    if method == "block" and draft_logits is None:
        method = "standard"
    target_logits = _unit_stride(target_logits)
    with _on(target_logits):
        draft = _draft(draft_logits, vocab)
    batch = Batch(
        logits=target_logits,
        logits_stride=target_logits.stride(0),
        vocab=vocab,
        draft_tokens=draft_tokens.contiguous(),
        cu_rows=None if min(sizes) == most_rows else _to_device(cu_rows, device),
        rows_each=most_rows,
        temperature=temperature.contiguous(),
        accept=keys.accept.contiguous(),
        resample=keys.resample.contiguous(),
        position=position.contiguous(),
        rates=None if synthetic_rates is None else synthetic_rates.contiguous(),
        num_rates=1 if synthetic_rates is None else synthetic_rates.shape[1],
    )
    integers = torch.empty(num_requests, dtype=torch.int32, device=device)
    out = Output(torch.empty(num_requests, most_rows, dtype=torch.int64, device=device), most_rows, integers)
    _verify(batch, draft, out, num_requests, num_rows, most_rows, method, use_fp64, chosen)
    return RejectionResult(out.tokens, out.num_emitted)


class _VerifyPlan(NamedTuple):
    """The division of work of the verification kernels."""

    first: Tuning
    second: Tuning  # for the tests of block verification
    shape: Shape
    tested: Shape | None  # None without block verification
    wave_rows: int
    waves: int
    tests: int
    has_dense: bool
    masses: torch.dtype


def _plan_verify(
    batch: Batch,
    draft: Draft,
    num_requests: int,
    most_rows: int,
    method: str,
    use_fp64: bool,
    chosen: Tuning | None,
) -> _VerifyPlan:
    is_block, is_sparse = method == "block", draft.token_ids is not None
    has_dense = draft.logits is not None and not is_sparse
    table = tuning.BLOCK_MASSES if is_block else tuning.REJECTION_DENSE if has_dense else tuning.REJECTION
    first = chosen or tuning.choose(table, num_requests)
    second = chosen or tuning.choose(tuning.BLOCK_TESTS, num_requests)
    count = most_rows if is_block else min(first.wave, most_rows)
    count = max(count, triton.cdiv(most_rows, MAX_WAVES))
    tests = most_rows - 1 if is_block else 0
    if tests > MAX_WAVES:
        raise ValueError(f"cu_rows: got {tests} drafts of a request with method 'block', expected at most {MAX_WAVES}")
    bytes_each = batch.logits.element_size()
    return _VerifyPlan(
        first=first,
        second=second,
        shape=Shape.of(batch.vocab, bytes_each, num_requests * most_rows, first, GROUP),
        tested=Shape.of(batch.vocab, bytes_each, 2 * num_requests, second, GROUP) if is_block else None,
        wave_rows=count,
        waves=triton.cdiv(most_rows, count),
        tests=tests,
        has_dense=has_dense,
        masses=torch.float64 if use_fp64 else torch.float32,
    )


def _make_scratch(plan: _VerifyPlan, num_requests: int, num_rows: int, device: torch.device) -> Scratch:
    """Allocate the memory for intermediate results of the verification kernels."""

    def buffer(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    shape, tested, masses, most = plan.shape, plan.tested, plan.masses, max(plan.waves, plan.tests)
    begin = _aligned(2 * num_requests)
    integers = counters.zeros(begin + most * num_requests, device)
    is_block, num_parts = tested is not None, shape.num_splits * plan.first.tile
    block = None
    if tested is not None:
        block = Block(
            weight=buffer(num_rows, dtype=masses),
            statistics=buffer(num_rows, 4, dtype=masses),
            prefixes=buffer(num_requests, dtype=torch.int32),
            group_mass=buffer(num_rows, tested.num_groups),
            part_mass=buffer(num_rows, tested.num_splits * plan.second.tile, dtype=masses),
        )
    return Scratch(
        group_top=buffer(num_rows, shape.num_groups),
        group_mass=None if is_block else buffer(num_rows, shape.num_groups),
        num_groups=shape.num_groups,
        part_top=buffer(num_rows, num_parts) if is_block else None,
        part_mass=buffer(num_rows, num_parts, dtype=masses) if is_block else None,
        draft_top=buffer(num_rows - num_requests, num_parts) if plan.has_dense else None,
        draft_mass=buffer(num_rows - num_requests, num_parts, dtype=masses) if plan.has_dense else None,
        waves=Waves(
            arrived=integers[begin:],
            state=integers[: 2 * num_requests].view(torch.int64),
            decision=buffer(num_requests, max(_capacity(plan.waves), plan.tests), 2, dtype=torch.int32),
        ),
        block=block,
    )


def _verify(
    batch: Batch,
    draft: Draft,
    out: Output,
    num_requests: int,
    num_rows: int,
    most_rows: int,
    method: str,
    use_fp64: bool,
    chosen: Tuning | None,
) -> None:
    plan = _plan_verify(batch, draft, num_requests, most_rows, method, use_fp64, chosen)
    scratch = _make_scratch(plan, num_requests, num_rows, batch.logits.device)
    first, second, shape, tested = plan.first, plan.second, plan.shape, plan.tested
    list_size = min(max(_power(draft.width), 16), 128)
    lists = triton.cdiv(draft.width, list_size) if draft.token_ids is not None else 0
    is_wide = use_fp64 or draft.column_of is not None
    constants: dict[str, Any] = {
        "USE_FP64": use_fp64,
        "GROUP": GROUP,
        "LINE": shape.line,
        "num_warps": WARPS,
        "LIST": list_size,
        "LISTS": lists,
        "WIDTH": _capacity(most_rows),
        **SAME_IN_ALL_THREADS,
    }
    with _on(batch.logits):
        verify_kernel[(plan.waves * num_requests * plan.wave_rows * shape.num_splits,)](
            *(batch, draft, scratch, out, num_requests, plan.wave_rows),
            METHOD=method,
            HAS_DRAFT_LOGITS=draft.logits is not None,
            TILE=first.tile,
            GROUPS=_groups(shape),
            DRAFT_GROUP=_draft_group(draft, first) if plan.has_dense else 1,
            ROWS=_capacity(plan.wave_rows),
            SPLITS=shape.num_splits,
            WAVES=_capacity(plan.waves),
            **constants,
            **first.limit(is_wide),
        )
        if tested is not None:
            block_kernel[(plan.tests * num_requests * tested.num_splits,)](
                *(batch, draft, scratch, out, num_requests, tested.num_groups, tested.num_splits),
                TILE=second.tile,
                GROUPS=_groups(tested),
                SPLITS=_power(tested.num_splits),
                WAVES=plan.tests,
                **constants,
                **second.limit(is_wide),
            )


def _groups(shape: Shape) -> int:
    """Return the compile-time size for the groups of a row, at least a few per lane."""
    return max(_power(shape.num_groups), 4)


def _draft_group(draft: Draft, chosen: Tuning) -> int:
    """Return the group size of dense or reduced draft logits, which the programs of the target's row read."""
    return min(max(_power(draft.width) // chosen.tile, 128), GROUP)


def _sizes(cu_rows: Tensor) -> list[int]:
    """Return the rows of each request; synchronises if `cu_rows` is on the device, which a capture does not allow."""
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
    """Make the device of `x` current for launches; does nothing on the CPU."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
