"""The sampling kernels on a GPU: their time, a peer's time, and the ratio to the time of the least memory traffic.

A CUDA graph captures each call with calls on copies of the input that together exceed the L2 cache several times;
replays are timed with CUDA events, and the median is divided by the number of calls. On average 3 of 5 drafts are
accepted. The floor is the time to read every row once (filters: and write it once) at copy bandwidth.

The filters are `process_logits` on all k + 1 rows of normally distributed logits, called eagerly and timed with the
host's work; their peer is the reference implementation, which sorts with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwire_bench.gpu_time import DEVICE, eager_time, replay_time
from draftwire_bench.kernels.peer import Peer
from draftwire_kernels import (
    DraftLogits,
    LogitsSampling,
    StreamKeys,
    derive_stream_keys,
    gumbel_sample,
    process_logits,
    rejection_sample,
)

V, K, TOP_N = 128256, 5, 64
ACCEPTANCE = 0.82
"""Probability that a draft is accepted after the earlier ones: 3.0 of 5 on average."""
SPREAD = 0.455
"""Standard deviation between draft logits and the target's, for a total variation of 1 - ACCEPTANCE."""
COPIED_BYTES = 300e6


@dataclass
class Inputs:
    """One batch of verification; all requests have K drafts."""

    target: Tensor
    drafts: Tensor
    cu_rows: Tensor
    temperature: Tensor
    keys: StreamKeys
    position: Tensor
    draft: DraftLogits | None

    @classmethod
    def make(cls, batch: int, form: str, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
        """Draw inputs; `form` is the form of q: "one-hot", "dense" or "top-n"."""
        g = torch.Generator(DEVICE).manual_seed(seed)
        target = torch.randn(batch, K + 1, V, device=DEVICE, generator=g) * 2
        keys = derive_stream_keys(range(seed * 100_000, seed * 100_000 + batch)).to(DEVICE)
        position = torch.randint(1, 9999, (batch,), device=DEVICE, generator=g)
        temperature = torch.ones(batch, device=DEVICE)
        draft = None
        if form in ("one-hot", "top-n"):
            drafts = torch.randint(V, (batch, K, 1), device=DEVICE, generator=g)
            others = target[:, :K].scatter(2, drafts, -torch.inf).logsumexp(2, keepdim=True)
            target[:, :K].scatter_(2, drafts, others + torch.tensor(ACCEPTANCE / (1 - ACCEPTANCE)).log())
            if form == "top-n":
                values, ids = target[:, :K].reshape(-1, V).topk(TOP_N)
                draft = DraftLogits(values + SPREAD * torch.randn(values.shape, device=DEVICE, generator=g), ids)
        else:
            logits = target[:, :K].reshape(-1, V)
            logits = logits + SPREAD * torch.randn(logits.shape, device=DEVICE, generator=g)
            offset = torch.arange(K, device=DEVICE, dtype=torch.int32).repeat(batch)
            drafts = gumbel_sample(
                logits, torch.ones(batch * K, device=DEVICE), keys.proposal.repeat_interleave(K),
                position.repeat_interleave(K) + offset, draft_offset=offset, backend="triton",
            )  # fmt: skip
            draft = DraftLogits(logits)
        cu_rows = torch.arange(batch + 1, dtype=torch.int32) * (K + 1)
        target = target.flatten(0, 1).to(dtype)
        return cls(target, drafts.flatten(), cu_rows, temperature, keys, position, draft)

    def bytes(self) -> int:
        """Return the bytes of all rows."""
        size = self.target.nbytes
        return size if self.draft is None else size + sum(t.nbytes for t in self.draft if t is not None)


def ours(x: Inputs, **options: Any) -> Any:
    """Verify the batch."""
    return rejection_sample(
        x.target, x.drafts, x.cu_rows, x.temperature, x.keys, x.position, draft_logits=x.draft, backend="triton",
        **options,
    )  # fmt: skip


def theirs(peer: Peer, x: Inputs, **options: Any) -> Callable[[], object]:
    """Return a call that verifies the batch with the peer's kernels on the same tensors."""
    batch = len(x.temperature)
    request = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    local = torch.arange(K + 1, device=DEVICE, dtype=torch.int32).repeat(batch)
    drafts = torch.cat([torch.zeros(batch, 1, device=DEVICE, dtype=torch.int64), x.drafts.view(batch, K)], 1)
    position = (x.position[:, None] + torch.arange(K + 1, device=DEVICE)).flatten()
    draft = None if x.draft is None else x.draft.logits.view(batch, K, V)
    cu_rows = x.cu_rows.to(DEVICE)
    expanded = request.repeat_interleave(K + 1)
    drafts = drafts.flatten().to(torch.int32)
    return lambda: peer.rejection.rejection_sample(
        x.target, draft, drafts, cu_rows, position, request, expanded, local, x.temperature, x.keys.accept, K,
        **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The measurement of one kernel with one batch."""

    name: str
    batch: int
    us: float
    peer_us: float | None
    floor_us: float
    megabytes: float
    accepted: float | None = None  # of K drafts


@dataclass(frozen=True)
class Case:
    """A kernel, the form of q, our options and the peer's (None if the peer has no such kernel)."""

    name: str
    form: str
    options: dict[str, Any]
    peer_options: dict[str, Any] | None
    dtype: torch.dtype = torch.float32


BLOCK, PEER_BLOCK, FP64 = {"method": "block"}, {"use_block_verification": True}, {"use_fp64": True}
REJECTION = (
    Case("rejection one-hot", "one-hot", {}, {}),
    Case("rejection one-hot float64", "one-hot", FP64, FP64),
    Case("rejection one-hot bfloat16", "one-hot", {}, {}, torch.bfloat16),
    Case("coupled", "one-hot", {"method": "coupled"}, None),
    Case("rejection dense", "dense", {}, {}),
    Case("rejection dense float64", "dense", FP64, FP64),
    Case("block dense", "dense", BLOCK, PEER_BLOCK),
    Case("block dense float64", "dense", BLOCK | FP64, None),
    Case("rejection dense bfloat16", "dense", {}, {}, torch.bfloat16),
    Case("block dense bfloat16", "dense", BLOCK, PEER_BLOCK, torch.bfloat16),
    Case("rejection top-n", "top-n", {}, None),
    Case("rejection top-n float64", "top-n", FP64, None),
)
GUMBEL = (
    Case("gumbel", "", {"use_fp64": False}, {}),
    Case("gumbel float64", "", {"use_fp64": True}, {}),
    Case("gumbel bfloat16", "", {"use_fp64": False}, {}, torch.bfloat16),
)


@dataclass(frozen=True)
class FilterCase:
    """Filters, and the logits' type."""

    name: str
    dtype: torch.dtype = torch.float32
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = (
    FilterCase("filters", torch.float32, 50, 0.9, 0.001),
    FilterCase("filters bfloat16", torch.bfloat16, 50, 0.9, 0.001),
    FilterCase("filter top-k 50 bfloat16", torch.bfloat16, top_k=50),
    FilterCase("filter top-p 0.9 bfloat16", torch.bfloat16, top_p=0.9),
    FilterCase("filter min-p 0.05 bfloat16", torch.bfloat16, min_p=0.05),
)


def measure_kernels(batch: int, peer: Peer | None, bandwidth: float, only: str) -> Iterator[Row]:
    """Measure a batch and yield the rows whose names contain `only`; `bandwidth` is in bytes per second."""
    for case in GUMBEL:
        if only in case.name:
            yield _gumbel_row(case, batch, peer, bandwidth)
    for case in REJECTION:
        if only in case.name:
            yield _rejection_row(case, batch, peer, bandwidth)
    for filters in FILTERS:
        if only in filters.name:
            yield _filter_row(filters, batch, bandwidth)


def _rejection_row(case: Case, batch: int, peer: Peer | None, bandwidth: float) -> Row:
    first = Inputs.make(batch, case.form, 1, case.dtype)
    copies = max(2, min(64, round(COPIED_BYTES / first.bytes())))
    inputs = [first, *(Inputs.make(batch, case.form, seed, case.dtype) for seed in range(2, copies + 1))]
    accepted = torch.cat([ours(x, **case.options).num_emitted for x in inputs]).float().mean().item() - 1
    us = replay_time(lambda i: ours(inputs[i], **case.options), copies)
    peer_us = None
    if peer is not None and case.peer_options is not None:
        calls = [theirs(peer, x, **case.peer_options) for x in inputs]
        peer_us = replay_time(lambda i: calls[i](), copies)
    return _row(case.name, batch, us, peer_us, first.bytes(), bandwidth, accepted)


def _gumbel_row(case: Case, batch: int, peer: Peer | None, bandwidth: float) -> Row:
    g = torch.Generator(DEVICE).manual_seed(0)
    copies = max(3, min(64, round(COPIED_BYTES / (batch * V * case.dtype.itemsize))))
    logits = [(torch.randn(batch, V, device=DEVICE, generator=g) * 2).to(case.dtype) for _ in range(copies)]
    temperature, position = torch.ones(batch, device=DEVICE), torch.arange(batch, device=DEVICE)
    key = derive_stream_keys(range(batch)).proposal.to(DEVICE)

    def call(i: int) -> object:
        return gumbel_sample(logits[i], temperature, key, position, backend="triton", **case.options)

    request = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    switches = {"apply_temperature": True, "is_drafting": True, **case.options}

    def peer_call(i: int) -> object:
        assert peer is not None
        return peer.gumbel.gumbel_sample(logits[i], request, temperature, key, position, **switches)

    us = replay_time(call, copies)
    peer_us = None if peer is None else replay_time(peer_call, copies)
    return _row(case.name, batch, us, peer_us, logits[0].nbytes, bandwidth)


def _filter_row(case: FilterCase, batch: int, bandwidth: float) -> Row:
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = (torch.randn(batch * (K + 1), V, device=DEVICE, generator=g) * 2).to(case.dtype)
    sampling = LogitsSampling(
        cu_rows=torch.arange(batch + 1, dtype=torch.int32) * (K + 1),
        temperature=torch.ones(batch),
        top_k=torch.full((batch,), case.top_k, dtype=torch.int32),
        top_p=torch.full((batch,), case.top_p),
        min_p=torch.full((batch,), case.min_p),
    )
    us = eager_time(lambda: process_logits(logits, sampling, backend="triton"))
    peer_us = eager_time(lambda: process_logits(logits, sampling, backend="reference"))
    return _row(case.name, batch, us, peer_us, 2 * logits.nbytes, bandwidth)


def _row(
    name: str,
    batch: int,
    us: float,
    peer_us: float | None,
    num_bytes: int,
    bandwidth: float,
    accepted: float | None = None,
) -> Row:
    return Row(name, batch, us, peer_us, num_bytes / bandwidth * 1e6, num_bytes / 1e6, accepted)
