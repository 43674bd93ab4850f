"""Small random checkpoints of heads and targets in the published layouts, equal on every machine and version.

Weights come from the raw output of PCG64, which its algorithm fixes. The seed includes the tensor's name in the EAGLE-3
layout of speculators, so that a weight has the same values in every layout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

NUM_ROWS = 18  # more than a block of the cache
NUM_DRAFTS = 3
TARGET_LAYERS = 8
VOCAB_SIZE = 64
DRAFT_VOCAB_SIZE = 24


def uniform(seed: int, name: str, shape: tuple[int, ...], deviation: float = 1.0) -> np.ndarray:
    """Return uniformly distributed float32 values of mean 0 and the given standard deviation."""
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    centred = (raw >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    return (centred * 12**0.5 * deviation).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Case:
    """A head with its target.

    Attributes
    ----------
    layout
        `eagle3`, `eagle1` (SafeAILab), `speculators_eagle3` or `speculators_eagle1`.
    layer
        Configuration of the decoder layers, with transformers' keys.
    options
        Other keys of the head's config.json.
    """

    layout: str
    layer: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    target_hidden_size: int = 32
    own_embedding: bool = False
    tied_target: bool = False

    @property
    def is_eagle3(self) -> bool:
        return self.layout.endswith("eagle3")

    @property
    def num_features(self) -> int:
        return len(self.options.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)) if self.is_eagle3 else 1

    @property
    def feature_width(self) -> int:
        return self.num_features * self.target_hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.options.get("draft_vocab_size", VOCAB_SIZE)


_LAYER = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
}
_REDUCED = {"draft_vocab_size": DRAFT_VOCAB_SIZE}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CASES = {
    "eagle3": Case("eagle3", _LAYER, _REDUCED),
    "eagle3_wide_target": Case(
        "eagle3",
        # cnets.py scales linearly only with the default rope_theta
        {**_LAYER, "num_key_value_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"draft_vocab_size": VOCAB_SIZE, "target_hidden_size": 48},
        seed=2,
        target_hidden_size=48,
        own_embedding=True,
    ),
    "eagle1": Case("eagle1", _LAYER, {"bias": False}, seed=3),
    "eagle1_biases": Case(
        "eagle1",
        {**_LAYER, "num_hidden_layers": 2, "qkv_bias": True, "rope_theta": 500000.0},
        seed=4,
        tied_target=True,
        own_embedding=True,
    ),
    "speculators_eagle3": Case("speculators_eagle3", {**_LAYER, "rope_parameters": _DEFAULT_ROPE}, _REDUCED),
    "speculators_options": Case(
        "speculators_eagle3",
        {
            **_LAYER,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3,
        },
        {
            **_REDUCED,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6],
        },
        seed=5,
    ),
    "speculators_qwen3": Case(
        "speculators_eagle3",
        {
            **_LAYER,
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rope_parameters": _YARN,
        },
        {**_REDUCED, "fc_norm": True, "norm_output": True},
        seed=6,
        own_embedding=True,
    ),
    "speculators_window": Case(
        "speculators_eagle3",
        {
            **_LAYER,
            "num_hidden_layers": 2,
            "rope_parameters": _DEFAULT_ROPE,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        _REDUCED,
        seed=7,
    ),
    "speculators_eagle1": Case("speculators_eagle1", {**_LAYER, "rope_parameters": _DEFAULT_ROPE}, seed=3),
}


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return shapes by tensor name in speculators' EAGLE-3 layout."""
    layer, hidden = case.layer, case.layer["hidden_size"]
    head_dim = layer.get("head_dim", hidden // layer["num_attention_heads"])
    q, kv = layer["num_attention_heads"] * head_dim, layer["num_key_value_heads"] * head_dim
    inner = layer["intermediate_size"]
    attention_bias = layer.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}."
        width = 2 * hidden if case.is_eagle3 and index == 0 else hidden
        linears = {
            "self_attn.q_proj": (q, width, attention_bias or layer.get("qkv_bias", False)),
            "self_attn.k_proj": (kv, width, attention_bias or layer.get("qkv_bias", False)),
            "self_attn.v_proj": (kv, width, attention_bias or layer.get("qkv_bias", False)),
            "self_attn.o_proj": (hidden, q, attention_bias),
            "mlp.gate_proj": (inner, hidden, layer.get("mlp_bias", False)),
            "mlp.up_proj": (inner, hidden, layer.get("mlp_bias", False)),
            "mlp.down_proj": (hidden, inner, layer.get("mlp_bias", False)),
        }
        for name, (out_features, in_features, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if case.is_eagle3 or index > 0:
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        if case.is_eagle3 and index == 0:
            shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        if layer["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    if case.own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, hidden)
    if case.is_eagle3:
        shapes |= {"fc.weight": (hidden, case.feature_width), "norm.weight": (hidden,)}
        shapes["lm_head.weight"] = (case.draft_vocab_size, hidden)
        if case.options.get("norm_before_fc"):
            shapes["input_norm.weight"] = (case.feature_width,)
        if case.options.get("fc_norm"):
            shapes |= {f"fc_norm.{i}.weight": (case.target_hidden_size,) for i in range(case.num_features)}
    else:
        shapes["fc.weight"] = (hidden, 2 * hidden)
        if case.options.get("bias", case.layout == "eagle1"):
            shapes["fc.bias"] = (hidden,)
    return shapes


def _weights(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            array = uniform(seed, name, shape, shape[1] ** -0.5)
        else:
            array = uniform(seed, name, shape, 0.2) + np.float32("norm" in name)
        tensors[name] = torch.from_numpy(array)
    return tensors


def _vocabulary(case: Case) -> dict[str, torch.Tensor]:
    """Return d2t and t2d of a reduced vocabulary."""
    if case.draft_vocab_size == VOCAB_SIZE:
        return {}
    ids = np.sort(np.argsort(uniform(case.seed, "d2t", (VOCAB_SIZE,)))[: case.draft_vocab_size])
    t2d = np.zeros(VOCAB_SIZE, bool)
    t2d[ids] = True
    return {"d2t": torch.from_numpy(ids - np.arange(len(ids))), "t2d": torch.from_numpy(t2d)}


def head_tensors(case: Case) -> dict[str, torch.Tensor]:
    """Return the head's tensors under the names of its layout."""
    tensors = _weights(case.seed, _shapes(case)) | _vocabulary(case)
    if case.layout == "eagle3":
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if case.layout == "speculators_eagle1":
        renamed = (name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.") for name in tensors)
        return dict(zip(renamed, tensors.values(), strict=True))
    return tensors


def head_config(case: Case) -> dict[str, Any]:
    """Return the head's config.json."""
    if not case.layout.startswith("speculators"):
        return {"architectures": ["LlamaForCausalLM"], **case.layer, **case.options}
    kind = case.layout.removeprefix("speculators_")
    kind = "eagle" if kind == "eagle1" else kind
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "transformer_layer_config": case.layer,
        **case.options,
    }


def target_tensors(case: Case) -> dict[str, torch.Tensor]:
    """Return the target's tensors that a head may share."""
    shape = (VOCAB_SIZE, case.target_hidden_size)
    shapes = {"model.embed_tokens.weight": shape} | ({} if case.tied_target else {"lm_head.weight": shape})
    return _weights(case.seed, shapes)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_pair(
    directory: Path,
    config: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: dict[str, Any],
    target_tensors: Mapping[str, torch.Tensor],
) -> tuple[Path, Path]:
    """Write a head and its target, with the config keys `target`, below `directory`; return their directories."""
    head_dir, target_dir = directory / "head", directory / "target"
    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE}
    for path, values, weights in (
        (head_dir, config, tensors),
        (target_dir, {**common, "num_hidden_layers": TARGET_LAYERS, **target}, target_tensors),
    ):
        path.mkdir(parents=True)
        write_json(path / "config.json", values)
        save_file(dict(weights), path / "model.safetensors")
    return head_dir, target_dir


def write_case(case: Case, directory: Path) -> tuple[Path, Path]:
    """Write head and target below `directory`; return their directories."""
    target = {"hidden_size": case.target_hidden_size, "tie_word_embeddings": case.tied_target}
    return write_pair(directory, head_config(case), head_tensors(case), target, target_tensors(case))


@cache
def stored_numbers(name: str) -> dict[str, torch.Tensor]:
    """Return the arrays of an .npz file in this folder."""
    with np.load(Path(__file__).with_name(name)) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, [NUM_ROWS + NUM_DRAFTS] int64, and features, [NUM_ROWS, width] float32.

    Accepted row i has token i and features i. A chain of drafts after row i has the tokens i + 1, i + 2, ...
    """
    tokens = np.argsort(uniform(case.seed, "tokens", (VOCAB_SIZE,)))[: NUM_ROWS + NUM_DRAFTS]
    features = uniform(case.seed, "features", (NUM_ROWS, case.feature_width))
    return torch.from_numpy(tokens), torch.from_numpy(features)
