"""Checks which causal language models of transformers the verifier serves, and compares the logits with transformers.

    python -m draftwire_bench.served_targets --json served-targets.json
    python -m draftwire_bench.served_targets --device cuda:0 --processes 10 --json served-targets-gpu.json

Creates a small model of each type with random weights and computes sequences in steps: prompts, rows of several drafts,
and rows that are computed again. Its logits and the states that enter its layers, which are the features, must be those
of transformers' forward pass in float32 on the CPU. On a GPU the model is compiled and runs as CUDA graphs, as in a
verifier. Models with experts are served on a GPU only in bfloat16; their median row may differ from float32 by twice
the difference of transformers' bfloat16. Types that cannot be created with these sizes are listed separately from types
that the verifier refuses. The exit code is 1 if a type is served with other logits or fails without a refusal.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftwire.contract.errors import CheckpointError, DraftwireError
from draftwire.model.devices import choose_device, make_current
from draftwire.model.kv_cache import SequenceRows
from draftwire_bench.environment import describe
from draftwire_bench.output import json_option, make_table, report_console, write_json
from verifier_service.core.batch import ForwardInput
from verifier_service.host.ranks import end_with_parent
from verifier_service.target.runner import start_runner
from verifier_service.target.target import Target, has_experts, load_target

# Fields of the configuration, set if a type has them: small layers, few experts, a window shorter than the sequences.
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "vocab_size_per_layer_input": 90,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The same for latent attention, which has as many KV heads as heads.
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
MOST_PARAMETERS = 20_000_000
# In float32: the largest difference of a logit or a state's element, relative to the largest of them.
TOLERANCE = 1e-4
# In bfloat16: the median row's difference, relative to that of transformers' bfloat16. The root mean square depends on
# the few rows where rounding selects another expert: for correct targets on a CPU it was 0.06 to 10 times that of
# transformers, the median row's difference at most 1.4 times.
ROUNDING = 2.0
LENGTHS = (30, 21)
BLOCKS = ([1, 2], [3, 4])
# (sequence, first row, rows) of each step: prompts, one row and several, one row each, rows that are computed again.
STEPS = [
    [(0, 0, 12), (1, 0, 9)],
    [(0, 12, 1), (1, 9, 11)],
    [(0, 13, 1), (1, 20, 1)],
    [(0, 13, 8), (1, 20, 1)],
    [(0, 16, 14)],
]
MOST_ROWS, NUM_DRAFTS = 32, 7  # prompt rows in a step; drafts of a sequence
ROUNDS = 8  # of the steps, each with new sequences
CPU = torch.device("cpu")
TYPES_A_PROCESS = 8  # some types leak memory
SERVED, OTHERS, REFUSED, NOT_MADE, FAILED = "served", "served with others", "refused", "not made", "failed"


@dataclass(frozen=True)
class Finding:
    """The outcome of one type of model."""

    model_type: str
    dtype: str  # "" if no model was created
    outcome: str
    detail: str  # the reason, or the differences


@click.command()
@click.option("--device", "device_name", default="cpu", show_default=True, help="Verifier's device, such as cuda:0.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Types tried in parallel.")
@json_option
@click.argument("model_types", nargs=-1)
def main(device_name: str, processes: int, json_path: Path | None, model_types: tuple[str, ...]) -> None:
    """Try MODEL_TYPES, by default all of them."""
    try:
        device = choose_device(device_name)
    except DraftwireError as error:
        raise click.ClickException(str(error)) from error
    every = model_types or tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = sorted(try_all(every, device, processes), key=lambda one: one.model_type)
    counts = Counter(finding.outcome for finding in found)
    columns = ("model type", "dtype", "outcome", "difference, or why")
    table = make_table(f"transformers {transformers.__version__}, {device}", columns, columns)
    for finding in found:
        table.add_row(finding.model_type, finding.dtype, finding.outcome, finding.detail)
    report_console().print(table, ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    write_json(json_path, describe() | {"device": str(device), "findings": [asdict(one) for one in found]})
    if counts[OTHERS] or counts[FAILED]:
        raise click.ClickException("a model is served with other logits than transformers', or fails without a refusal")


def try_in_process(model_type: str, device: torch.device) -> Finding:
    """Try a model type and free its memory."""
    finding = try_type(model_type, device)
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()  # torch refuses to compile more than eight models in a process
        torch.cuda.synchronize(device)  # raises a persistent CUDA error, which may have caused a refusal
        torch.cuda.empty_cache()
    return finding


def try_all(
    model_types: Sequence[str],
    device: torch.device,
    processes: int,
    attempt: Callable[[str, torch.device], Finding] = try_in_process,
) -> list[Finding]:
    """Try each model type with `attempt` in child processes, which are replaced when they die."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # by default each process starts one more per core
    spawn = multiprocessing.get_context("spawn")
    idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()

    def start() -> None:
        process = ProcessPoolExecutor(1, spawn, end_with_parent, max_tasks_per_child=TYPES_A_PROCESS)
        idle.put(stack.enter_context(process))

    def try_one(model_type: str) -> Finding:
        process = idle.get()
        try:
            finding = process.submit(attempt, model_type, device).result()
        except Exception as error:  # the process has died or is broken
            finding = Finding(model_type, "", FAILED, _first_line(error))
        # A CUDA error persists in its process, and so does the state of torch's generator after a failed capture.
        if finding.outcome in (FAILED, REFUSED):
            process.shutdown()
            start()
        else:
            idle.put(process)
        return finding

    with ExitStack() as stack, ThreadPoolExecutor(processes) as threads:
        for _ in range(processes):
            start()
        found = []
        for finding in threads.map(try_one, model_types):
            click.echo(f"{finding.model_type}: {finding.outcome}, {finding.detail}", err=True)
            found.append(finding)
        return found


def try_type(model_type: str, device: torch.device = CPU) -> Finding:
    """Create a small model of the type, serve it, and compare its logits and states."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    make_current(device)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            dtype = save_small(model_type, directory, device)
            exact = compute(directory, torch.float32, CPU)
        except Exception as error:  # various kinds, if the sizes do not fit the type
            return Finding(model_type, "", NOT_MADE, _first_line(error))
        try:
            served = serve(load_target(directory, model_type, dtype, device))
            if dtype == torch.float32:
                difference = largest_difference(served, exact)
                is_served, detail = difference < TOLERANCE, f"{difference:.1e}"
            else:
                ours, own = worst_rounding(served, compute(directory, dtype, device), exact)
                is_served, detail = ours <= ROUNDING * own, f"{ours:.1e}, transformers' {own:.1e}"
            outcome = SERVED if is_served else OTHERS
        except CheckpointError as error:
            outcome, detail = REFUSED, _first_line(error)
        except Exception as error:  # any failure without a refusal is a finding
            outcome, detail = FAILED, _first_line(error)
    return Finding(model_type, str(dtype).removeprefix("torch."), outcome, detail)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, CheckpointError) else f"{type(error).__name__}: {lines[0][:100]}"


def save_small(model_type: str, directory: Path, device: torch.device) -> torch.dtype:
    """Save a model of the type in its serving dtype."""
    config_class = type(transformers.AutoConfig.for_model(model_type))
    sizes = SIZES | (LATENT_SIZES if hasattr(config_class, "kv_lora_rank") else {"head_dim": 16})
    known = {name for name in sizes if hasattr(config_class, name)} | set(config_class.attribute_map)
    config = config_class(**{name: size for name, size in sizes.items() if name in known})
    with torch.device("meta"):
        parameters = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters with these sizes")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    dtype = torch.bfloat16 if device.type == "cuda" and has_experts(model) else torch.float32
    model.to(dtype).save_pretrained(directory)
    return dtype


class Rows(NamedTuple):
    """The result of a step of T rows, float32 on the CPU."""

    logits: Tensor  # [(T + 1) / 2, vocab_size], of every second row
    states: Tensor  # [T, num_layers * hidden_size], the layers' inputs


def _rounds() -> list[list[Tensor]]:
    """Return the sequences of each round."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
        for _ in range(ROUNDS)
    ]


@torch.inference_mode()
def compute(directory: Path, dtype: torch.dtype, device: torch.device) -> list[Rows]:
    """Return the steps of all rounds, computed by transformers' model from whole sequences."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    model.to(device).eval()
    entering: list[Tensor] = []
    for layer in getattr(model.base_model, "layers", []):
        layer.register_forward_pre_hook(lambda _layer, args: entering.append(args[0][0]))

    def of_sequence(tokens: Tensor) -> tuple[Tensor, Tensor]:
        entering.clear()
        logits = model(tokens[None].to(device), use_cache=False).logits[0]
        return logits.float().cpu(), torch.cat(entering or [logits], -1).float().cpu()

    steps = []
    for sequences in _rounds():
        logits, states = zip(*map(of_sequence, sequences), strict=True)
        for step in STEPS:
            logits_of_step, states_of_step = (
                torch.cat([every[i][start : start + count] for i, start, count in step]) for every in (logits, states)
            )
            steps.append(Rows(logits_of_step[::2], states_of_step))
    return steps


def serve(target: Target) -> list[Rows]:
    """Return the steps of all rounds, computed by the verifier's target."""
    if target.device.type == "cuda":
        target.compile()
    runner = start_runner(target, 5, len(LENGTHS), NUM_DRAFTS, MOST_ROWS)
    steps = []
    for sequences in _rounds():
        tokens = [one.numpy() for one in sequences]
        for step in STEPS:
            rows = ForwardInput(
                np.concatenate([tokens[i][start : start + count] for i, start, count in step]),
                np.concatenate([np.arange(start, start + count) for _, start, count in step]),
                [SequenceRows(BLOCKS[i], start, count) for i, start, count in step],
                np.arange(sum(count for _, _, count in step))[::2],
            )
            output = runner.run(rows)
            steps.append(Rows(output.logits.float().cpu(), output.features(range(target.num_layers)).float().cpu()))
    return steps


def largest_difference(found: Sequence[Rows], expected: Sequence[Rows]) -> float:
    """Return the largest difference of an element relative to the step's largest element; NaN if any is NaN."""
    pairs = zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True)
    return float(torch.stack([(one - other).abs().max() / other.abs().max() for one, other in pairs]).max())


def worst_rounding(served: Sequence[Rows], own: Sequence[Rows], exact: Sequence[Rows]) -> tuple[float, float]:
    """Return the served and transformers' differences from the exact values where their ratio is largest."""
    ours, theirs = _roundings(served, exact), _roundings(own, exact)
    worst = (ours / theirs).argmax()  # NaN if any is NaN
    return float(ours[worst]), float(theirs[worst])


def _roundings(found: Sequence[Rows], exact: Sequence[Rows]) -> Tensor:
    """Return the median row's relative difference of each step's logits and states, over all rounds."""
    medians = []
    for i in range(len(STEPS)):
        for kind in range(len(Rows._fields)):
            one, other = (torch.cat([rows[kind] for rows in steps[i :: len(STEPS)]]) for steps in (found, exact))
            medians.append(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())
    return torch.stack(medians)


if __name__ == "__main__":
    main()
