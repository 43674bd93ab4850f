"""Compile every specialisation of the Triton kernels for an H200 on a machine without a GPU; print time and resources.

    python tests/kernels/ahead_of_time.py [--front-end] [--only NAME]

Triton's interpreter runs kernels as Python and misses errors of the compiler (a branch that changes a type, returns of
two types). `--front-end` stops at Triton's IR, which is enough to find these errors. Without it ptxas runs too, and
each line has registers and spilled bytes per thread and shared memory per program.
"""

import argparse
import re
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from drafter_service.draft_loop import kernels as loop_kernels
from drafter_service.draft_loop.inputs import PackedInputs
from drafter_service.draft_loop.state import BlockState, LoopState
from drafter_service.heads import kernels as head_kernels
from draftwire_kernels import DraftLogits, LogitsSampling, RaggedBatch, derive_stream_keys
from draftwire_kernels.gpu import accepted_rows, launch, paged_attention_launch
from draftwire_kernels.gpu import filters as gpu_filters
from draftwire_kernels.reference.layout import Layout

TARGET = GPUTarget("cuda", 90, 32)
V, K = 128256, 5


class OfflineDriver:
    """A driver with the GPU properties that Triton reads before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def gumbel(rows: int, use_fp64: bool = False, dtype: torch.dtype = torch.float32, reduced: bool = False) -> None:
    integers = torch.zeros(rows, dtype=torch.int64)
    ids = torch.zeros(V, dtype=torch.int64) if reduced else None
    launch.gumbel_sample(torch.empty(rows, V, dtype=dtype), torch.ones(rows), integers, integers, 0, ids, use_fp64)


def rejection(
    batch: int,
    form: str,
    method: str = "standard",
    use_fp64: bool = False,
    dtype: torch.dtype = torch.float32,
    ragged: bool = False,
) -> None:
    drafts = batch * K
    sizes = torch.full((batch,), K + 1)
    sizes[: 2 if ragged else 0] += torch.tensor([1, -1])[: 2 if ragged else 0]
    cu_rows = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    narrow, ids = torch.empty(drafts, 64), torch.zeros(drafts, 64, dtype=torch.int64)
    draft = {
        "one-hot": None,
        "dense": DraftLogits(torch.empty(drafts, V)),
        "reduced": DraftLogits(torch.empty(drafts, 32000), torch.zeros(32000, dtype=torch.int64)),
        "top-n": DraftLogits(narrow, ids),
    }[form]
    launch.rejection_sample(
        torch.empty(drafts + batch, V, dtype=dtype), torch.zeros(drafts, dtype=torch.int64), cu_rows, torch.ones(batch),
        derive_stream_keys(range(batch)), torch.zeros(batch, dtype=torch.int64), draft, method,
        torch.ones(K + 1, 16) if method == "synthetic" else None, use_fp64,
    )  # fmt: skip


def filters(rows: int, dtype: torch.dtype = torch.float32) -> None:
    cu_rows = torch.arange(rows + 1, dtype=torch.int32)
    sampling = LogitsSampling(cu_rows, torch.ones(rows), top_k=torch.full((rows,), 50, dtype=torch.int32))
    layout = Layout.from_cu_rows(cu_rows, rows, cu_rows.device)
    gpu_filters.apply_filters(torch.empty(rows, V, dtype=dtype), sampling, layout)


def gather(width: int, dtype: torch.dtype) -> None:
    cu_rows, places = torch.arange(33, dtype=torch.int32) * (K + 1), torch.zeros(32, dtype=torch.int64)
    slots, out = torch.zeros(32 * (K + 1), dtype=torch.int64), torch.empty(32 * (K + 1), width, dtype=dtype)
    drawn = torch.zeros(32, K + 2, dtype=torch.int64)
    accepted_rows.gather_accepted_rows(torch.empty_like(out), slots, cu_rows, places, drawn, out)


def attention(
    batch: int,
    rows: int,
    group: int = 4,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    max_length: int = 8192,
    causal: bool = True,
    anchored: bool = False,
) -> None:
    kv_heads, total = 8, batch * rows
    integers = torch.zeros(batch + 1, dtype=torch.int32)
    tables = torch.zeros(batch, 512, dtype=torch.int32)
    ragged = RaggedBatch.from_tensors(
        torch.zeros(total, dtype=torch.int64), integers, integers[1:], tables, max_rows=rows, max_length=max_length
    )
    query, key = (
        torch.empty(total, kv_heads * group, size, dtype=dtype),
        torch.empty(total, kv_heads, size, dtype=dtype),
    )
    cache = torch.empty(64, kv_heads, size, dtype=dtype)
    bounds = (0.1, window, softcap, causal, anchored)
    paged_attention_launch.paged_attention(query, key, key, cache, cache, ragged, *bounds)


def store_keys(rows: int, heads: int = 8, size: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    kv, cache = torch.empty(rows, 5, 2, heads, size, dtype=dtype)[:, 1], torch.empty(64, heads, size, dtype=dtype)
    integers, angles = torch.zeros(rows, dtype=torch.int64), torch.empty(512, size // 2, dtype=dtype)
    norm = torch.empty(size, dtype=dtype), 1e-6
    head_kernels.store_keys_(kv, integers, integers, angles, angles, norm, cache, cache)


def begin_block(batch: int, rows: int) -> None:
    packed = PackedInputs(batch, batch * 8, 15, torch.device("cpu")).device(batch, batch * 8)
    state = LoopState.allocate(batch, batch * 8, 512, 7, torch.device("cpu"))
    wide = torch.zeros(batch * rows, dtype=torch.int64)
    loop_kernels.begin_block(packed, state, BlockState(wide, wide, wide, state.lengths), rows)


def calls() -> dict[str, Callable[[], None]]:
    table: dict[str, Callable[[], None]] = {}
    for use_fp64 in (False, True):
        suffix = " fp64" if use_fp64 else ""
        for method, forms in {
            "standard": ("one-hot", "dense", "reduced", "top-n"),
            "block": ("dense", "reduced", "top-n"),
            "synthetic": ("one-hot", "dense"),
            "coupled": ("one-hot",),
        }.items():
            for form in forms:
                table[f"{method} {form}{suffix}"] = lambda f=form, m=method, d=use_fp64: rejection(32, f, m, d)  # type: ignore[misc]
        table[f"gumbel{suffix}"] = lambda d=use_fp64: gumbel(32, d)  # type: ignore[misc]
    table["gumbel reduced bfloat16"] = lambda: gumbel(32, dtype=torch.bfloat16, reduced=True)
    table["standard one-hot bfloat16"] = lambda: rejection(32, "one-hot", dtype=torch.bfloat16)
    table["standard one-hot ragged batch of 256"] = lambda: rejection(256, "one-hot", ragged=True)
    table["standard dense batch of 1"] = lambda: rejection(1, "dense")
    table["standard one-hot batch of 1"] = lambda: rejection(1, "one-hot")
    table["standard dense batch of 128"] = lambda: rejection(128, "dense")
    table["block dense bfloat16"] = lambda: rejection(8, "dense", "block", dtype=torch.bfloat16)
    table["gumbel batch of 1"] = lambda: gumbel(1)
    table["filters"] = lambda: filters(32)
    table["filters bfloat16"] = lambda: filters(32, torch.bfloat16)
    for width, dtype in product((1, 33, 3 * 4096), (torch.bfloat16, torch.float16, torch.float32)):
        table[f"accepted rows {width} {str(dtype).removeprefix('torch.')}"] = lambda w=width, d=dtype: gather(w, d)  # type: ignore[misc]
    for batch, rows in ((1, 1), (1, 5), (8, 5), (32, 5), (64, 5), (64, 1), (8, 17), (1, 512), (8, 512)):
        table[f"attention {batch} x {rows} rows"] = lambda b=batch, r=rows: attention(b, r)  # type: ignore[misc]
    for size, dtype in product((64, 96, 128, 256), (torch.bfloat16, torch.float32)):
        for rows in (5, 512):
            name = f"attention {rows} rows of {size} {str(dtype).removeprefix('torch.')}"
            table[name] = lambda r=rows, s=size, d=dtype: attention(2, r, size=s, dtype=d)  # type: ignore[misc]
    for batch, rows in ((1, 7), (32, 7), (8, 16)):
        table[f"attention {batch} x block of {rows}"] = lambda b=batch, r=rows: attention(b, r, causal=False)  # type: ignore[misc]
    table["attention anchored window"] = lambda: attention(8, 8, window=2049, anchored=True)
    table["keys into a cache"] = lambda: store_keys(32)
    table["keys into a cache float32"] = lambda: store_keys(32, size=96, dtype=torch.float32)
    table["block of drafts"] = lambda: begin_block(32, 7)
    table["attention without a share"] = lambda: attention(32, 5, max_length=512)
    table["attention window and softcap"] = lambda: attention(2, 512, window=4096, softcap=50.0)
    table["attention 7 heads each float16"] = lambda: attention(4, 5, 7, 64, torch.float16)
    return table


def front_end(kernel: JITFunction, _key: str, signature: Any, device: int, constants: Any, options: Any,
              attributes: Any, _warmup: bool) -> None:  # fmt: skip
    """Generate a kernel's Triton IR instead of compiling it."""
    _, _, _, backend, _ = kernel.device_caches[device]
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generated = backend.get_codegen_implementation(options)
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    source.make_ir(TARGET, options, generated, backend.get_module_map(), context)


def resources(cubin: bytes, folder: Path) -> str:
    path = folder / "ahead_of_time.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    out = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    path.unlink()
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", out)
    assert found is not None
    return "{:>4} registers {:>4} bytes spilled {:>6} shared".format(*found.groups())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-end", action="store_true")
    parser.add_argument("--only", default="", help="part of a call's name")
    arguments = parser.parse_args()
    driver.set_active(OfflineDriver())
    # Properties of the GPU. The tensors are on the CPU.
    paged_attention_launch.multiprocessors = lambda _device: 132
    paged_attention_launch.overlaps = lambda _device: True
    run = JITFunction.run
    label = ""

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        kernel = run(self, *args, **kwargs | {"warmup": True})
        used = resources(kernel.asm["cubin"], Path.cwd()) if kernel is not None else ""
        print(f"{label:40} {self.__name__:16} {time.perf_counter() - start:5.1f} s  {used}", flush=True)

    JITFunction.run = compile_only
    if arguments.front_end:
        JITFunction._do_compile = front_end
    for name, call in calls().items():
        label = name
        if arguments.only in name:
            call()


if __name__ == "__main__":
    main()
