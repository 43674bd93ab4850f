"""A draft step on a GPU, in one process with random bfloat16 weights; by default of Llama-3.1-8B's EAGLE-3 shape.

    python -m draftwire_bench.drafting [--json FILE] [--batches 1,4,8,16,32,64] [--context 512]
    python -m draftwire_bench.drafting --target benchmarks/shapes/qwen3-8b --head benchmarks/shapes/qwen3-8b-dspark \\
        --drafts 7 --batches 1,8,32,64

`replay` is the time of the captured step (CUDA events), `step` the time from a step's submission with features on the
GPU to its answer with draft logits on the GPU; both are medians. Each sequence has 1 to 5 rows, 3 on average. Features
are fused, as verifiers send them. The floor is the time for the least reads at the device's copy bandwidth: the head's
weights once per pass, and keys and values of the context. The kernels of a replay follow.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.engine import DraftEngine
from drafter_service.engine.session import Session
from drafter_service.engine.step import OpenedSequence, Step
from drafter_service.heads import ChainHead, Head, load_head
from drafter_service.limits import EngineLimits
from draftwire.transport import Incoming
from draftwire_bench.commands.options import Numbers
from draftwire_bench.environment import SHAPES, describe
from draftwire_bench.gpu_time import copy_bandwidth, device_times, kernel_times
from draftwire_bench.output import json_option, make_table, report_console, write_json

MAX_NUM_SEQS, MAX_MODEL_LEN, WARM_STEPS, STEPS, REPLAYS = 64, 8192, 5, 40, 50
MODES = {
    "greedy": SamplingMode(),
    "gumbel": SamplingMode(gumbel=True),
    "gumbel, dense": SamplingMode(gumbel=True, dense=True),
    "gumbel, top 64": SamplingMode(gumbel=True, top_n=64),
    "gumbel, dense, confidences": SamplingMode(gumbel=True, dense=True, confidences=True),
}
PROFILED = (1, 32)


@dataclass
class Rig:
    """An engine with one session and its sequences."""

    engine: DraftEngine
    session: Session
    answers: list[Any]
    num_rows: list[int]  # accepted rows of each sequence so far
    num_drafts: int  # of a step
    step_id: int = 0

    @classmethod
    def open(cls, engine: DraftEngine, mode: SamplingMode, batch: int, context: int, num_drafts: int) -> Rig:
        answers: list[Any] = []
        session = engine.open_session(SessionTerms("benchmark", mode, num_drafts, MAX_NUM_SEQS), answers.append)
        rig = cls(engine, session, answers, [0] * batch, num_drafts)
        new = [OpenedSequence(i, temperature=1.0, proposal_key=i, first_row=0) for i in range(batch)]
        rig.submit([context] * batch, 0, new)
        while engine.has_work:
            engine.iterate()
        answers.clear()
        return rig

    def submit(self, counts: list[int], num_drafts: int, new: list[OpenedSequence] | None = None) -> None:
        total, batch = sum(counts), len(counts)
        spec, device = self.engine.head.spec, self.engine.device
        self.step_id += 1
        step = Step(
            step_id=self.step_id,
            opened=new or [],
            closed_ids=[],
            sequence_ids=list(range(batch)),
            first_rows=np.array(self.num_rows),
            num_rows=np.array(counts),
            num_drafts=np.full(batch, num_drafts),
            tokens=torch.randint(spec.target_vocab_size, (total,), dtype=torch.int32).numpy(),
            features=Incoming(torch.randn(total, spec.hidden_size).bfloat16().to(device), device),
            is_fused=True,
        )
        self.num_rows = [rows + count for rows, count in zip(self.num_rows, counts, strict=True)]
        self.engine.submit(self.session, step)

    def step(self) -> float:
        """Return the seconds from submission to answer."""
        batch = len(self.num_rows)
        self.submit([(i + self.step_id) % 5 + 1 if batch > 1 else 3 for i in range(batch)], self.num_drafts)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.engine.iterate()
        seconds = time.perf_counter() - began
        assert sum(self.answers.pop().drafts.num_drafts) == self.num_drafts * batch
        return seconds


@torch.inference_mode()
def measure(engine: DraftEngine, mode: SamplingMode, batch: int, context: int, num_drafts: int) -> dict[str, Any]:
    rig = Rig.open(engine, mode, batch, context, num_drafts)
    seconds = [rig.step() for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    replay = last_replay(engine, batch, mode, num_drafts)
    row: dict[str, Any] = {
        "batch": batch,
        "replay_ms": statistics.median(device_times(replay, REPLAYS)) * 1e3,
        "step_ms": statistics.median(seconds) * 1e3,
        "step_p95_ms": sorted(seconds)[int(len(seconds) * 0.95)] * 1e3,
        "draft_logits_bytes": engine.logits_bytes,
    }
    if batch in PROFILED and mode == SamplingMode():
        row["kernels"] = kernel_times(replay)
    engine.close_session(rig.session)
    return row


def last_replay(engine: DraftEngine, batch: int, mode: SamplingMode, num_drafts: int) -> Callable[[], None]:
    """Return a call that replays the last step."""
    graphs = engine.graphs
    assert graphs is not None
    shape = graphs.shape_for(mode, batch, batch, num_drafts)
    assert shape is not None
    return lambda: graphs.replay(shape)


def weight_bytes(head_dir: Path, head: Head, quantization: str | None = None) -> dict[str, int]:
    """Return the bytes of weights that are read by a pass of the layers, by lm_head, for the context's keys and values
    and by a Markov slot; in bfloat16, with quantization half for products with normed inputs."""
    each = 2 if quantization is None else 1
    config, spec = json.loads((head_dir / "config.json").read_text(encoding="utf-8")), head.spec
    hidden, inner, num_layers = spec.hidden_size, config["intermediate_size"], len(spec.layer_shapes)
    queries = config["num_attention_heads"] * config["head_dim"]
    keys_and_values = sum(heads * (key + value) for heads, key, value in spec.layer_shapes)
    qkv = num_layers * queries + keys_and_values
    given = qkv // num_layers if isinstance(head, ChainHead) else 0  # the first layer's input is embedding and state
    return {
        "layers": hidden * (each * (qkv + given + num_layers * 2 * inner) + 2 * num_layers * (queries + inner)),
        "output": each * hidden * spec.draft_vocab_size,
        "context": 0 if isinstance(head, ChainHead) else 2 * hidden * keys_and_values,
        "markov": 2 * config.get("markov_rank", 0) * spec.draft_vocab_size,
    }


def floor_bytes(weights: dict[str, int], head: Head, batch: int, context: int, num_drafts: int) -> int:
    cached = batch * context * sum(heads * (key + value) * 2 for heads, key, value in head.spec.layer_shapes)
    one_pass = weights["layers"] + weights["output"] + cached
    if isinstance(head, ChainHead):
        return num_drafts * one_pass
    return one_pass + weights["context"] + num_drafts * weights["markov"]


def show(console: Console, results: dict[str, Any]) -> None:
    title = f"Draft step of {results['head']}, k = {results['drafts']}, milliseconds, on {results['device']}"
    table = make_table(title, ("mode", "batch", "floor", "replay", "step", "step p95", "host and copies"))
    for mode, rows in results["modes"].items():
        for row in rows:
            numbers = [row["floor_ms"], row["replay_ms"], row["step_ms"], row["step_p95_ms"]]
            numbers.append(row["step_ms"] - row["replay_ms"])
            table.add_row(mode, str(row["batch"]), *(f"{number:.3f}" for number in numbers))
    console.print(table)
    for row in results["modes"]["greedy"]:
        if "kernels" in row:
            title = f"Kernels of a greedy replay at batch {row['batch']}: {row['replay_ms']:.3f} ms"
            table = make_table(title, ("kernel", "launches", "us"), ["kernel"])
            for kernel in row["kernels"]:
                table.add_row(kernel["kernel"], f"{kernel['launches']:.0f}", f"{kernel['us']:.1f}")
            console.print(table)
    console.print(f"peak memory of tensors: {results['peak_bytes'] / 2**30:.2f} GiB")


@click.command()
@json_option
@click.option("--batches", type=Numbers(int), default="1,4,8,16,32,64", show_default=True)
@click.option("--context", default=512, show_default=True, help="Accepted rows per sequence before the first step.")
@click.option("--target", type=click.Path(path_type=Path), default=SHAPES / "llama-3.1-8b")
@click.option("--head", "head_dir", type=click.Path(path_type=Path), default=SHAPES / "llama-3.1-8b-eagle3")
@click.option("--quantization", type=click.Choice(["fp8"]), help="Of the head.")
@click.option("--drafts", default=4, show_default=True, help="Drafts per sequence and step.")
def main(
    json_path: Path | None,
    batches: Sequence[int],
    context: int,
    target: Path,
    head_dir: Path,
    quantization: str | None,
    drafts: int,
) -> None:
    """Measure and print tables."""
    device = torch.device("cuda:0")
    bandwidth = copy_bandwidth()
    torch.cuda.reset_peak_memory_stats()
    head = load_head(head_dir, target, torch.bfloat16, device, dummy=True, quantization=quantization)
    max_model_len = min(MAX_MODEL_LEN, head.spec.max_position_embeddings)
    limits = EngineLimits(MAX_NUM_SEQS, max_model_len, kv_cache_tokens=MAX_NUM_SEQS * 2048)
    weights = weight_bytes(head_dir, head, quantization)
    engine = DraftEngine(head, limits, torch.bfloat16, device)
    engine.warm_up()
    results: dict[str, Any] = {
        **describe(),
        "device": torch.cuda.get_device_name(),
        "head": head_dir.name,
        "quantization": quantization,
        "drafts": drafts,
        "context": context,
        "copy_bandwidth": bandwidth,
        "modes": {},
    }
    for name, mode in MODES.items():
        # Keeps the mode's buffers and graphs between batch sizes.
        keeper = engine.open_session(SessionTerms("keeper", mode, drafts, 1), lambda _: None)
        results["modes"][name] = [
            measure(engine, mode, size, context, drafts)
            | {"floor_ms": floor_bytes(weights, head, size, context, drafts) / bandwidth * 1e3}
            for size in batches
        ]
        engine.close_session(keeper)
    results["peak_bytes"] = torch.cuda.max_memory_allocated()
    show(report_console(), results)
    write_json(json_path, results)


if __name__ == "__main__":
    main()
