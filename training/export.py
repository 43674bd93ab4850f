"""Exports heads in the published layouts, with weights in bfloat16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head
from training.layers import HeadShape

SHARD_BYTES = 15_000_000


def _common_config(shape: HeadShape, end: int) -> dict[str, Any]:
    """Return the keys that all heads' config.json share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **shape.as_dict(),
    }


def export_eagle3(head: Eagle3Head, layers: list[int], directory: Path, end: int) -> None:
    """Write the published EAGLE-3 layout (SafeAILab/EAGLE), which vLLM loads.

    A head with the target's whole vocabulary is written without lm_head.
    """
    state, shape = exported_weights(head), head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "mlp_bias": False,
        **_common_config(shape, end),
        "draft_vocab_size": shape.vocab_size if head.lm_head is None else head.lm_head.out_features,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    # EAGLE's code loads the target's embedding only if this key is absent, so write it only if the widths differ.
    target_hidden_size = state["fc.weight"].shape[1] // len(layers)
    if target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = target_hidden_size
    _write(config, state, directory)


def export_dspark(head: DSparkHead, layers: list[int], target_layers: int, directory: Path, end: int) -> None:
    """Write the flat layout of deepseek-ai (`Qwen3DSparkModel`), without the target's embedding and lm_head."""
    shape = head.shape
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **_common_config(shape, end),
        "block_size": head.block_size,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "markov_head_type": "rnn",
        "markov_rank": head.markov_head.markov_w1.embedding_dim,
        "mask_token_id": head.mask_token,
        "num_anchors": 128,
        "num_target_layers": target_layers,
        "sliding_window": None,
        "target_layer_ids": layers,
        "use_sliding_window": False,
    }
    _write(config, exported_weights(head), directory)


def exported_weights(head: Eagle3Head | DSparkHead) -> dict[str, Tensor]:
    """Return the head's weights with the scale of the states folded into `fc`."""
    state = dict(head.state_dict())
    state["fc.weight"] = head.fc.folded()
    del state["fc.scale"]
    return state


def load_weights(head: torch.nn.Module, directory: Path) -> None:
    """Load exported weights into a head of the same shape, in float32."""
    state: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state |= load_file(file)
    state["fc.scale"] = torch.ones(state["fc.weight"].shape[1])
    head.load_state_dict({name: w.float() if w.is_floating_point() else w for name, w in state.items()})


def _write(config: dict[str, Any], state: dict[str, Tensor], directory: Path) -> None:
    """Write config.json and shards of at most SHARD_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: _rounded(value) for name, value in state.items()}
    parts: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in weights.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = SHARD_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes
    for stale in directory.glob("*.safetensors*"):
        stale.unlink()
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
        index |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        _write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )
    _write_json(directory / "config.json", config)


def _rounded(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return (value.bfloat16() if value.is_floating_point() else value).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
