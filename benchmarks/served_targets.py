"""Which of transformers' causal language models the verifier serves, and whether as transformers computes them.

    python -m benchmarks.served_targets --json served-targets.json

Each type of model is made small, with random weights, and given sequences bit by bit: prompts, rows of several drafts,
rows that come again. Its logits, and the states that enter its layers, which features are made of, must be those of
transformers' own forward pass. Types that cannot be made small from
these sizes are told apart from those that the verifier refuses. Exit code 1 when one is served with others, or fails
with anything but a refusal.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftwire.bench.environment import describe
from draftwire.errors import CheckpointError
from draftwire.kv_cache import KVCache, RaggedBatch, SequenceRows
from verifier_service.target import Target, load_target

# Of every type that has such fields, so that its layers are small; a window shorter than the sequences, few experts.
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
# Of attention whose keys and values are made from one latent: as many KV heads as heads.
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
MOST_PARAMETERS = 20_000_000
# The largest difference of a logit or of a state's element, over the largest of them.
TOLERANCE = 1e-4
LENGTHS = (30, 21)
# (sequence, first row, rows) of each step: prompts, one row beside several, rows that were refused and come again.
STEPS = [[(0, 0, 12), (1, 0, 9)], [(0, 12, 1), (1, 9, 11)], [(0, 13, 8), (1, 20, 1)], [(0, 16, 14)]]
SERVED, OTHERS, REFUSED, NOT_MADE, FAILED = "served", "served with others", "refused", "not made", "failed"


@dataclass(frozen=True)
class Finding:
    """What became of one type of model."""

    model_type: str
    outcome: str
    detail: str  # why, or the largest difference


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the result.")
@click.argument("model_types", nargs=-1)
def main(json_path: Path | None, model_types: tuple[str, ...]) -> None:
    """Tries MODEL_TYPES, by default all of them."""
    found = sorted(_try_all(model_types or tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)), key=lambda one: one.model_type)
    counts = Counter(finding.outcome for finding in found)
    table = Table(title=f"transformers {transformers.__version__}", title_justify="left", box=SIMPLE)
    for column in ("model type", "outcome", "largest difference, or why"):
        table.add_column(column)
    for finding in found:
        table.add_row(finding.model_type, finding.outcome, finding.detail)
    Console().print(table, ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if json_path is not None:
        json_path.write_text(json.dumps(describe() | {"findings": [asdict(one) for one in found]}, indent=1) + "\n")
    if counts[OTHERS] or counts[FAILED]:
        raise click.ClickException("a model is served with others than transformers' logits, or not refused by name")


def _try_all(model_types: tuple[str, ...]) -> list[Finding]:
    # A process for a few of them: some types take much memory even when they are not used.
    with (
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=8) as pool,
        click.progressbar(pool.imap(try_type, model_types), len(model_types), "model types", file=sys.stderr) as bar,
    ):
        return list(bar)


def try_type(model_type: str) -> Finding:
    """Makes a small model of the type, serves it and compares its logits."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            _save_small(model_type, Path(directory))
            references = _references(Path(directory))
        except Exception as error:  # of many kinds, where sizes do not fit the type
            return Finding(model_type, NOT_MADE, _first_line(error))
        try:
            target = load_target(Path(directory), model_type, torch.float32, torch.device("cpu"))
            difference = _largest_difference(target, references)
        except CheckpointError as error:
            return Finding(model_type, REFUSED, _first_line(error))
        except Exception as error:  # whatever it is, it is what this program looks for
            return Finding(model_type, FAILED, _first_line(error))
    return Finding(model_type, SERVED if difference < TOLERANCE else OTHERS, f"{difference:.1e}")


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, CheckpointError) else f"{type(error).__name__}: {lines[0][:100]}"


def _save_small(model_type: str, directory: Path) -> None:
    config_class = type(transformers.AutoConfig.for_model(model_type))
    sizes = SIZES | (LATENT_SIZES if hasattr(config_class, "kv_lora_rank") else {"head_dim": 16})
    known = {name for name in sizes if hasattr(config_class, name)} | set(config_class.attribute_map)
    config = config_class(**{name: size for name, size in sizes.items() if name in known})
    with torch.device("meta"):
        parameters = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters with these sizes")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@dataclass(frozen=True)
class Reference:
    """A sequence, and what transformers computes of it."""

    tokens: Tensor
    logits: Tensor  # [tokens, vocab_size]
    states: Tensor  # [tokens, num_layers * hidden_size]: what enters the layers


@torch.inference_mode()
def _references(directory: Path) -> list[Reference]:
    generator = torch.Generator().manual_seed(5)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    entering: list[Tensor] = []
    for layer in getattr(model.base_model, "layers", []):
        layer.register_forward_pre_hook(lambda _layer, args: entering.append(args[0][0]))
    references = []
    for length in LENGTHS:
        tokens = torch.randint(3, SIZES["vocab_size"], (length,), generator=generator)
        logits = model.eval()(tokens[None], use_cache=False).logits[0]
        references.append(Reference(tokens, logits, torch.cat(entering, -1) if entering else logits))
        entering.clear()
    return references


@torch.inference_mode()
def _largest_difference(target: Target, references: list[Reference]) -> float:
    cache = KVCache(target.layer_shapes, 5, torch.float32, target.device)
    blocks = ([1, 2], [3, 4])
    largest = 0.0
    for step in STEPS:
        batch = RaggedBatch([SequenceRows(blocks[i], start, count) for i, start, count in step], target.device)
        tokens, logits, states = (
            torch.cat([getattr(references[i], name)[start : start + count] for i, start, count in step])
            for name in ("tokens", "logits", "states")
        )
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in step])
        asked_for = torch.arange(len(tokens))[::2]
        output = target.forward(tokens, positions, cache, batch, asked_for)
        for found, expected in ((output.logits, logits[asked_for]), (torch.cat(output.states[:-1], -1), states)):
            largest = max(largest, float((found - expected).abs().max() / expected.abs().max()))
    return largest


if __name__ == "__main__":
    main()
