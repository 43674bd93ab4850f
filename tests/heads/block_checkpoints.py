"""Small random checkpoints of DFlash, DSpark and P-EAGLE heads in the published layouts, as in head_checkpoints.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head_checkpoints import DRAFT_VOCAB_SIZE, VOCAB_SIZE, uniform, write_pair

HIDDEN, HEAD_DIM, TARGET_LAYERS = 32, 16, 8
NUM_ROWS = 20  # rows of features; more than a block of the cache
ANCHORS = (1, 5, 17)  # positions n of the anchors: rows 0 .. n - 1 are their context


@dataclass(frozen=True)
class BlockCase:
    """A head with its target.

    Attributes
    ----------
    layout
        `flat` (deepseek-ai), `nested` (SpecForge, z-lab), `dflash`, `dspark` or `peagle` (speculators).
    layer
        Keys of the decoder layers that differ from `_LAYER`.
    options
        The head's keys: of `dflash_config` with `nested`, else of the top level.
    """

    layout: str
    layer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 21
    reduced: bool = False
    own_embedding: bool = False
    own_output: bool = False
    own_mask: bool = False

    @property
    def is_speculators(self) -> bool:
        return self.layout in ("dflash", "dspark", "peagle")

    @property
    def draft_vocab_size(self) -> int:
        return DRAFT_VOCAB_SIZE if self.reduced else VOCAB_SIZE

    @property
    def num_features(self) -> int:
        ids = self.options.get("target_layer_ids") or self.options.get("aux_hidden_state_layer_ids")
        return len(ids or self.options["eagle_aux_hidden_state_layer_ids"])

    @property
    def layers(self) -> dict[str, Any]:
        return {**_LAYER, **self.layer}


_LAYER: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
}
_FLAT = {"block_size": 4, "target_layer_ids": [1, 3, 5], "mask_token_id": 62, "num_anchors": 4, "num_target_layers": 8}
_NESTED = {"target_layer_ids": [0, 4, 6], "mask_token_id": 61}
_AUX = {"block_size": 4, "aux_hidden_state_layer_ids": [2, 4, 6], "mask_token_id": 60}
_MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,  # without it transformers' Qwen3Config drops the window
}
_DSPARK = {"markov_rank": 8, "enable_confidence_head": True}

CASES = {
    "deepseek_dspark": BlockCase(
        "flat",
        options={**_FLAT, **_DSPARK, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
        own_embedding=True,
        own_output=True,
    ),
    "deepseek_gated": BlockCase(
        "flat",
        {"attention_bias": True},
        {**_FLAT, **_DSPARK, "markov_head_type": "gated", "confidence_head_with_markov": False},
        seed=22,
    ),
    "deepseek_rnn": BlockCase(
        "flat",
        {"rope_theta": 1000000.0, "num_key_value_heads": 1},
        {**_FLAT, **_DSPARK, "markov_head_type": "rnn", "confidence_head_with_markov": True},
        seed=23,
        own_embedding=True,
    ),
    "deepseek_dflash": BlockCase(
        "flat", options={**_FLAT, "markov_rank": 0, "enable_confidence_head": False}, seed=24, own_output=True
    ),
    "specforge_dflash": BlockCase("nested", options=_NESTED, seed=25),
    "specforge_windows": BlockCase("nested", _MIXED, _NESTED, seed=26),
    "specforge_dspark": BlockCase(
        "nested",
        options={**_NESTED, **_DSPARK, "projector_type": "dspark", "confidence_head_with_markov": True},
        seed=27,
    ),
    "speculators_dflash": BlockCase("dflash", options=_AUX, seed=28, reduced=True, own_output=True),
    "speculators_windows": BlockCase("dflash", _MIXED, _AUX, seed=29, reduced=True, own_output=True),
    "speculators_windows_both_ways": BlockCase(
        "dspark",
        _MIXED,
        {**_AUX, **_DSPARK, "sliding_window_non_causal": True},
        seed=30,
        reduced=True,
        own_embedding=True,
        own_output=True,
    ),
    "speculators_rnn_behind_the_anchor": BlockCase(
        "dspark",
        options={**_AUX, **_DSPARK, "markov_head_type": "rnn", "sample_from_anchor": False},
        seed=31,
        reduced=True,
        own_output=True,
    ),
    "peagle": BlockCase(
        "peagle",
        {"model_type": "llama", "head_dim": 8},
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 59, "norm_before_residual": True},
        seed=32,
        reduced=True,
        own_embedding=True,
        own_output=True,
    ),
    "peagle_windows": BlockCase(
        "peagle",
        _MIXED,
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 59, "fc_norm": True},
        seed=33,
        reduced=True,
        own_output=True,
    ),
}


def _shapes(case: BlockCase) -> dict[str, tuple[int, ...]]:
    layers, options, is_peagle = case.layers, case.options, case.layout == "peagle"
    q, kv = (layers[f"num_{name}_heads"] * layers["head_dim"] for name in ("attention", "key_value"))
    inner, width = layers["intermediate_size"], case.num_features * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layers["num_hidden_layers"]):
        prefix = f"layers.{index}."
        given = 2 * HIDDEN if is_peagle and index == 0 else HIDDEN
        linears = {"q_proj": (q, given), "k_proj": (kv, given), "v_proj": (kv, given), "o_proj": (HIDDEN, q)}
        for name, shape in linears.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = shape
            if layers["attention_bias"]:
                shapes[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        if layers["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (layers["head_dim"],) for name in "qk"}
        for name, shape in {"gate": (inner, HIDDEN), "up": (inner, HIDDEN), "down": (HIDDEN, inner)}.items():
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {"fc.weight": (HIDDEN, width), "norm.weight": (HIDDEN,)}
    if is_peagle:
        shapes |= {"layers.0.hidden_norm.weight": (HIDDEN,), "mask_hidden": (1, 1, width)}
        if options.get("fc_norm"):
            shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(case.num_features)}
    else:
        shapes["hidden_norm.weight"] = (HIDDEN,)
    return shapes | _more_shapes(case)


def _more_shapes(case: BlockCase) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if case.own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, HIDDEN)
    if case.own_output:
        shapes["lm_head.weight"] = (case.draft_vocab_size, HIDDEN)
    rank = case.options.get("markov_rank", 0)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (VOCAB_SIZE, rank)
        shapes["markov_head.markov_w2.weight"] = (case.draft_vocab_size, rank)
        kind = case.options.get("markov_head_type")
        if kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, HIDDEN + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + HIDDEN)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if case.options.get("enable_confidence_head"):
        with_markov = case.options.get("confidence_head_with_markov", case.is_speculators)
        shapes["confidence_head.proj.weight"] = (1, HIDDEN + (rank if with_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if case.own_mask:
        shapes["mask_embedding"] = (1, HIDDEN)
    return shapes


def head_tensors(case: BlockCase) -> dict[str, torch.Tensor]:
    """Return the head's tensors under the names of its layout."""
    tensors = {}
    for name, shape in _shapes(case).items():
        deviation = 0.2 if len(shape) == 1 else 1.0 if name == "mask_hidden" else shape[-1] ** -0.5
        tensors[name] = torch.from_numpy(uniform(case.seed, name, shape, deviation) + np.float32("norm.w" in name))
    if case.reduced:
        ids = np.sort(np.argsort(uniform(case.seed, "d2t", (VOCAB_SIZE,)))[:DRAFT_VOCAB_SIZE])
        t2d = np.zeros(VOCAB_SIZE, bool)
        t2d[ids] = True
        tensors |= {"d2t": torch.from_numpy(ids - np.arange(len(ids))), "t2d": torch.from_numpy(t2d)}
    return tensors


def head_config(case: BlockCase) -> dict[str, Any]:
    """Return the head's config.json."""
    if case.layout == "flat":
        return {"architectures": ["Qwen3DSparkModel"], **case.layers, **case.options}
    if case.layout == "nested":
        is_dspark = "projector_type" in case.options
        name = "DSparkDraftModel" if is_dspark else "DFlashDraftModel"
        own = {"block_size": 4, "num_target_layers": TARGET_LAYERS, "dflash_config": case.options}
        return {"architectures": [name], **case.layers, **own}
    reduced = {"draft_vocab_size": case.draft_vocab_size}
    return {
        "architectures": [{"dflash": "DFlash", "dspark": "DSpark", "peagle": "PEagle"}[case.layout] + "Speculator"],
        "speculators_model_type": case.layout,
        "speculators_config": {
            "algorithm": case.layout,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "transformer_layer_config": case.layers,
        **reduced,
        **case.options,
    }


def target_tensors(case: BlockCase) -> dict[str, torch.Tensor]:
    """Return the target's tensors that a head may share."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {
        name: torch.from_numpy(uniform(case.seed, name, (VOCAB_SIZE, HIDDEN), HIDDEN**-0.5)) for name in names
    }


def write_case(case: BlockCase, directory: Path) -> tuple[Path, Path]:
    """Write head and target below `directory`; return their directories."""
    target = {"hidden_size": HIDDEN, "max_position_embeddings": 64}
    return write_pair(directory, head_config(case), head_tensors(case), target, target_tensors(case))


def inputs(case: BlockCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens x_i, [NUM_ROWS + 8] int64, and features g_i, [NUM_ROWS, width] float32."""
    tokens = np.argsort(uniform(case.seed, "tokens", (VOCAB_SIZE,)))[: NUM_ROWS + 8]
    features = uniform(case.seed, "features", (NUM_ROWS, case.num_features * HIDDEN))
    return torch.from_numpy(tokens), torch.from_numpy(features)
