"""Paged attention on a GPU: time of a layer, compared to torch's attention on a contiguous cache and to a lower bound.

    python -m draftwire_bench.attention [--json FILE] [--only NAME]

Llama-3.1-8B's shape: 32 query heads, 8 key-value heads, head size 128, bfloat16.
`ours` is attention with the cache write, in a CUDA graph captured for sequences of up to 131072 rows; `bounded` is the
same captured for 2048 rows, or for the next power of two that holds the context. `torch` is
scaled_dot_product_attention's flash kernel with contiguous keys and values, without a write. A CUDA graph captures each
call with calls on other caches that together exceed the L2 cache several times; replays are timed with CUDA events, and
the median is divided by the number of calls. The floor is the larger of two times: bytes (context, queries, result and
new rows, each once) at copy bandwidth, and operations at the rate of a large matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftwire_bench.environment import describe
from draftwire_bench.gpu_time import DEVICE, copy_bandwidth, product_rate, replay_time
from draftwire_bench.output import json_option, write_json
from draftwire_kernels import BLOCK_SIZE, BatchBuffers, SequenceRows, paged_attention

HEADS, KV_HEADS, SIZE = 32, 8, 128
DTYPE = torch.bfloat16
LONGEST, SHORTEST = 131072, 2048  # rows of a sequence that graphs are captured for
COPIED_BYTES = 300e6


@dataclass(frozen=True)
class Case:
    """`batch` sequences with `rows` new rows each and a context of `context` rows, the first one of `longest` rows."""

    batch: int
    rows: int
    context: int
    longest: int = 0

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.rows} rows at {self.context}" + (
            f", one at {self.longest}" if self.longest else ""
        )

    @property
    def contexts(self) -> list[int]:
        return [max(self.context, self.longest), *[self.context] * (self.batch - 1)]

    def bytes(self) -> int:
        row = SIZE * DTYPE.itemsize
        new = self.batch * self.rows
        return 2 * sum(self.contexts) * KV_HEADS * row + 2 * new * HEADS * row + 4 * new * KV_HEADS * row

    def operations(self) -> int:
        """Return the operations of the two matrix products with the keys that each row attends to."""
        cached = sum(self.contexts) - self.batch * self.rows
        return 4 * HEADS * SIZE * (self.rows * cached + self.batch * self.rows * (self.rows + 1) // 2)

    @property
    def copies(self) -> int:
        return max(2, min(128, round(COPIED_BYTES / self.bytes())))


CASES = [
    *(Case(batch, 5, 512) for batch in (1, 4, 8, 16, 32, 64)),
    *(Case(batch, 1, 512) for batch in (1, 8, 32, 64)),
    *(Case(batch, 5, context) for batch, context in ((1, 8192), (1, 32768), (8, 4096), (32, 4096))),
    Case(32, 5, 512, 8192),
    *(Case(1, 17, context) for context in (512, 8192)),
    *(Case(batch, rows, context) for batch, rows, context in ((1, 512, 512), (1, 2048, 2048), (1, 512, 8192))),
    Case(8, 256, 2048),
]


class Layers:
    """The caches of a case, one per copy, and the rows of one step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        blocks = [-(-context // BLOCK_SIZE) for context in case.contexts]
        num_blocks = sum(blocks) + 1
        g = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=g).to(DTYPE)

        new = case.batch * case.rows
        self.q, self.k, self.v = (random(new, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        slots = num_blocks * BLOCK_SIZE
        self.keys, self.values = ([random(slots, KV_HEADS, SIZE) for _ in range(case.copies)] for _ in "kv")
        order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).split(blocks)
        sequences = [
            SequenceRows(own.numpy(), context - case.rows, case.rows)
            for own, context in zip(order, case.contexts, strict=True)
        ]
        self.buffers = BatchBuffers(new, case.batch, LONGEST // BLOCK_SIZE, torch.device(DEVICE))
        self.sequences = sequences
        self.bound(LONGEST)

    def bound(self, max_length: int) -> None:
        """Set the longest sequence that `attend` is captured for."""
        case = self.case
        self.batch = self.buffers.load(self.sequences, case.batch * case.rows, case.batch, max_length=max_length)

    def attend(self, copy: int) -> Tensor:
        keys, values = self.keys[copy], self.values[copy]
        return paged_attention(self.q, self.k, self.v, keys, values, self.batch, scale=SIZE**-0.5)


def torch_call(case: Case) -> Callable[[int], Tensor]:
    """Return torch's attention on contiguous keys and values; causal only for whole prompts."""
    g = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(case.batch, HEADS, case.rows, SIZE, device=DEVICE, generator=g).to(DTYPE)
    shape = (case.batch, KV_HEADS, case.context, SIZE)
    keys, values = (
        [torch.randn(shape, device=DEVICE, generator=g).to(DTYPE) for _ in range(case.copies)] for _ in "kv"
    )

    def call(copy: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            is_prompt = case.rows == case.context
            return F.scaled_dot_product_attention(q, keys[copy], values[copy], is_causal=is_prompt, enable_gqa=True)

    return call


@click.command()
@click.option("--only", default="", help="Only cases with this text in their names.")
@json_option
def main(only: str, json_path: Path | None) -> None:
    """Measure and print."""
    bandwidth, rate = copy_bandwidth(), product_rate()
    device = torch.cuda.get_device_name()
    print(f"{device}, copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s, torch {torch.__version__}")
    print(f"{'':34} {'ours us':>8} {'bounded':>8} {'torch us':>8} {'floor us':>8} {'ratio':>6}")
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        layers = Layers(case)
        us = replay_time(layers.attend, case.copies)
        layers.bound(max(SHORTEST, 1 << (max(case.contexts) - 1).bit_length()))
        bounded_us = replay_time(layers.attend, case.copies)
        del layers
        torch_us = float("nan") if case.longest else replay_time(torch_call(case), case.copies)
        floor_us = max(case.bytes() / bandwidth, case.operations() / rate) * 1e6
        numbers = f"{us:8.2f} {bounded_us:8.2f} {torch_us:8.2f} {floor_us:8.2f} {bounded_us / floor_us:6.2f}"
        print(f"{case.name:34} {numbers}", flush=True)
        measured = {"us": us, "bounded_us": bounded_us, "torch_us": torch_us, "floor_us": floor_us}
        rounded = {name: round(value, 2) for name, value in measured.items() if value == value}
        rows.append({**vars(case), **rounded, "bytes": case.bytes(), "operations": case.operations()})
    result = {
        **describe(),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "product_operations_per_s": rate,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "dtype": str(DTYPE)},
        "longest": LONGEST,
        "rows": rows,
    }
    write_json(json_path, result)


if __name__ == "__main__":
    main()
