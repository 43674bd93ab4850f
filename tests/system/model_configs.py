"""Configurations of small models, written to disk."""

from __future__ import annotations

import json
from pathlib import Path

from models import CONTEXT, NUM_LAYERS


def write_config(directory: Path, **changes) -> Path:
    """Write the configuration of a small model to a new directory."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "vocab_size": 310,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")
    return directory
