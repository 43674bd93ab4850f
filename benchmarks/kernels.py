"""Kernels on a GPU: microseconds beside a peer's kernels, the bytes that must move, and the ratio to that floor.

    python -m benchmarks.kernels [--json FILE] [--peer DIR] [--batches 1,8,32,128,256] [--only NAME]

DIR holds vLLM's `gumbel.py` and `rejection_sampler_utils.py` (Model Runner V2, from its wheel); they run alone, on the
same tensors, in the same process. Every call is captured in a CUDA graph together with calls on enough copies of the
input to pass through the L2 cache several times; a replay is timed with CUDA events, the median of several is divided
by the number of calls. V = 128256, k = 5, temperature 1; drafts are accepted about 3 of 5 on average. The floor is
every row read once (filters: and written once) at the copy bandwidth measured in the same run.

The rows "filters" are `process_logits` with top-k 50, top-p 0.9 and min-p 0.001 on all k + 1 rows, called eagerly, the
host's work included; their peer is the reference, which sorts with torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.timing import copy_bandwidth, replay_time
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
"""Of each draft given the ones before it: 3.0 of 5 on average."""
SPREAD = 0.455
"""Standard deviation of draft logits around the target's, for a total variation of 1 - ACCEPTANCE."""
COPIED_BYTES = 300e6
DEVICE = "cuda"


@triton.jit
def _unused(x: Any) -> Any:  # the peer's file names a watermark kernel that is not called
    return x


@dataclass
class Peer:
    gumbel: Any
    rejection: Any


def load_peer(folder: Path) -> Peer:
    """The peer's two files with stand-ins for what they import and these calls do not use."""
    from triton.language.extra import libdevice

    def module(name: str, **names: object) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

    for parent in ("vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.worker", "vllm.v1.worker.gpu",
                   "vllm.v1.worker.gpu.sample"):  # fmt: skip
        module(parent)
    module("vllm.triton_utils", tl=tl, triton=triton, tldevice=libdevice)
    module("vllm.v1.spec_decode.fly", compute_fly_entropy=None)
    module("vllm.v1.worker.gpu.sample.watermark", philox_gumbel_block_argmax=_unused)

    def load(name: str, file: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, folder / file)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        spec.loader.exec_module(loaded)
        return loaded

    gumbel = load("vllm.v1.worker.gpu.sample.gumbel", "gumbel.py")
    return Peer(gumbel, load("peer_rejection", "rejection_sampler_utils.py"))


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
        """Every row once."""
        size = self.target.nbytes
        return size if self.draft is None else size + sum(t.nbytes for t in self.draft if t is not None)


def ours(x: Inputs, **options: Any) -> object:
    return rejection_sample(
        x.target, x.drafts, x.cu_rows, x.temperature, x.keys, x.position, draft_logits=x.draft, backend="triton",
        **options,
    )  # fmt: skip


def theirs(peer: Peer, x: Inputs, **options: Any) -> Callable[[], object]:
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


@dataclass
class Row:
    name: str
    batch: int
    us: float
    peer_us: float | None
    floor_us: float
    megabytes: float
    accepted: float | None

    def text(self) -> str:
        peer = f"{self.peer_us:8.1f} {self.peer_us / self.us:6.2f}" if self.peer_us else f"{'':8} {'':6}"
        accepted = f"{self.accepted:5.2f}" if self.accepted is not None else ""
        ratio = self.us / self.floor_us
        return (
            f"{self.name:28} {self.batch:4} {self.us:8.1f} {peer} {self.megabytes:8.1f} {self.floor_us:8.1f} "
            f"{ratio:6.2f} {accepted}"
        )


HEADER = f"{'':28} {'B':>4} {'ours us':>8} {'peer us':>8} {'faster':>6} {'MB':>8} {'floor us':>8} {'ratio':>6} accepted"


def rejection_rows(batch: int, peer: Peer | None, bandwidth: float, only: str) -> list[Row]:
    rows = []
    for form in ("one-hot", "dense", "top-n"):
        cases: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [(f"rejection {form}", {}, {})]
        cases.append((f"rejection {form} float64", {"use_fp64": True}, {"use_fp64": True}))
        if form == "dense":
            cases.append(("block dense", {"method": "block"}, {"use_block_verification": True}))
            cases.append(("block dense float64", {"method": "block", "use_fp64": True}, None))
            cases.append(("rejection dense bfloat16", {}, {}))
            cases.append(("block dense bfloat16", {"method": "block"}, {"use_block_verification": True}))
        if form == "one-hot":
            cases.append(("rejection one-hot bfloat16", {}, {}))
            cases.append(("coupled", {"method": "coupled"}, None))
        for name, options, peer_options in cases:
            if only not in name:
                continue
            dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
            first = Inputs.make(batch, form, 1, dtype)
            copies = max(2, min(64, round(COPIED_BYTES / first.bytes())))
            inputs = [first, *(Inputs.make(batch, form, seed, dtype) for seed in range(2, copies + 1))]
            accepted = torch.cat([ours(x, **options).num_emitted for x in inputs]).float().mean().item() - 1  # type: ignore[attr-defined]
            us = replay_time(lambda i, xs=inputs, o=options: ours(xs[i], **o), copies)  # type: ignore[misc]
            peer_us = None
            if peer is not None and peer_options is not None and form != "top-n":
                calls = [theirs(peer, x, **peer_options) for x in inputs]
                peer_us = replay_time(lambda i, c=calls: c[i](), copies)  # type: ignore[misc]
            size = first.bytes()
            rows.append(Row(name, batch, us, peer_us, size / bandwidth * 1e6, size / 1e6, accepted))
            print(rows[-1].text(), flush=True)
            del inputs
    return rows


def gumbel_rows(batch: int, peer: Peer | None, bandwidth: float, only: str) -> list[Row]:
    rows = []
    for name, dtype, fp64 in (
        ("gumbel", torch.float32, False),
        ("gumbel float64", torch.float32, True),
        ("gumbel bfloat16", torch.bfloat16, False),
    ):
        if only not in name:
            continue
        g = torch.Generator(DEVICE).manual_seed(0)
        copies = max(3, min(64, round(COPIED_BYTES / (batch * V * dtype.itemsize))))
        logits = [(torch.randn(batch, V, device=DEVICE, generator=g) * 2).to(dtype) for _ in range(copies)]
        temperature, position = torch.ones(batch, device=DEVICE), torch.arange(batch, device=DEVICE)
        key = derive_stream_keys(range(batch)).proposal.to(DEVICE)

        def call(i: int, x: list[Tensor] = logits, fp64: bool = fp64) -> Tensor:
            return gumbel_sample(x[i], temperature, key, position, use_fp64=fp64, backend="triton")  # noqa: B023

        us = replay_time(call, copies)
        peer_us = None
        if peer is not None:
            request = torch.arange(batch, device=DEVICE, dtype=torch.int32)

            arguments = (request, temperature, key, position)

            def peer_call(
                i: int, x: list[Tensor] = logits, a: tuple[Tensor, ...] = arguments, fp64: bool = fp64
            ) -> object:
                return peer.gumbel.gumbel_sample(x[i], *a, apply_temperature=True, is_drafting=True, use_fp64=fp64)

            peer_us = replay_time(peer_call, copies)
        size = logits[0].nbytes
        rows.append(Row(name, batch, us, peer_us, size / bandwidth * 1e6, size / 1e6, None))
        print(rows[-1].text(), flush=True)
    return rows


def eager_time(call: Callable[[], object]) -> float:
    """Median microseconds of a call with all that the host does for it."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])


def filter_rows(batch: int, bandwidth: float, only: str) -> list[Row]:
    if only not in "filters":
        return []
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(batch * (K + 1), V, device=DEVICE, generator=g) * 2
    sampling = LogitsSampling(
        cu_rows=torch.arange(batch + 1, dtype=torch.int32) * (K + 1),
        temperature=torch.ones(batch),
        top_k=torch.full((batch,), 50, dtype=torch.int32),
        top_p=torch.full((batch,), 0.9),
        min_p=torch.full((batch,), 0.001),
    )
    us = eager_time(lambda: process_logits(logits, sampling, backend="triton"))
    peer_us = eager_time(lambda: process_logits(logits, sampling, backend="reference"))
    size = 2 * logits.nbytes
    row = Row("filters", batch, us, peer_us, size / bandwidth * 1e6, size / 1e6, None)
    print(row.text(), flush=True)
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--only", default="", help="part of a row's name")
    arguments = parser.parse_args()
    peer = None if arguments.peer is None else load_peer(arguments.peer)
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, copy bandwidth {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, triton {triton.__version__}")
    print(HEADER)
    rows: list[Row] = []
    for batch in map(int, arguments.batches.split(",")):
        rows += gumbel_rows(batch, peer, bandwidth, arguments.only)
        rows += rejection_rows(batch, peer, bandwidth, arguments.only)
        rows += filter_rows(batch, bandwidth, arguments.only)
    if arguments.json is not None:
        result = {
            "device": name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "copy_bandwidth_bytes_per_s": bandwidth,
            "shape": {"vocabulary": V, "drafts": K, "temperature": 1.0},
            "rows": [vars(replace(row)) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
