"""Exports heads in the published layouts, with weights in bfloat16."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwire.contract.errors import CheckpointError
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


def eagle3_config(head: Eagle3Head, layers: list[int], end: int) -> dict[str, Any]:
    """Return config.json of the published EAGLE-3 layout (SafeAILab/EAGLE), which vLLM loads.

    A head with the target's whole vocabulary is written without lm_head.
    """
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "mlp_bias": False,
        **_common_config(shape, end),
        "draft_vocab_size": shape.vocab_size if head.lm_head is None else head.lm_head.out_features,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    # EAGLE's code loads the target's embedding only if this key is absent, so write it only if the widths differ.
    target_hidden_size = head.fc.in_features // len(layers)
    if target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = target_hidden_size
    return config


def dspark_config(head: DSparkHead, layers: list[int], target_layers: int, end: int) -> dict[str, Any]:
    """Return config.json of deepseek-ai's flat layout (`Qwen3DSparkModel`), without the target's weights."""
    shape = head.shape
    return {
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


def exported_weights(head: Eagle3Head | DSparkHead) -> dict[str, Tensor]:
    """Return the head's weights with the scale of the states folded into `fc`."""
    state = dict(head.state_dict())
    state["fc.weight"] = head.fc.folded()
    del state["fc.scale"]
    return state


def load_head(head: Eagle3Head | DSparkHead, config: dict[str, Any], directory: Path) -> None:
    """Load exported weights into a head with this config, in float32; its scale of the states remains.

    Raises:
        CheckpointError: If config.json of the directory differs.
    """
    file = directory / "config.json"
    found = json.loads(file.read_text())
    for key, value in config.items():
        if found.get(key) != value:
            raise CheckpointError(
                f"{file}: {key} = {found.get(key)}, but must be {value}, that of the head in training"
            )
    state: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        state |= load_file(shard)
    state = {name: w.float() if w.is_floating_point() else w for name, w in state.items()}
    scale = head.fc.scale
    state |= {"fc.scale": scale, "fc.weight": state["fc.weight"].to(scale.device) * scale}
    head.load_state_dict(state)


def export_head(head: Eagle3Head | DSparkHead, config: dict[str, Any], directory: Path) -> None:
    """Write config.json and shards of at most SHARD_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: _rounded(value) for name, value in exported_weights(head).items()}
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
