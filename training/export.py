"""Writes the target and the head as other engines load them; weights are rounded to bf16 here and nowhere else."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.llama import Llama, LlamaShape

SHARD_BYTES = 15_000_000


def shards(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in order, cut so that no part exceeds SHARD_BYTES."""
    parts: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if size > room:
            parts.append({})
            room = SHARD_BYTES
        parts[-1][name] = tensor
        room -= size
    return parts


def common_config(shape: LlamaShape, end: int) -> dict:
    """Keys that the configs of target and head share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **shape.as_dict(),
    }


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (value.detach().cpu().bfloat16() if value.is_floating_point() else value.detach().cpu()).contiguous()
        for name, value in state.items()
    }


def export_target(model: Llama, directory: Path, end: int) -> None:
    """config.json, generation_config.json and bf16 shards of a transformers LlamaForCausalLM."""
    directory.mkdir(parents=True, exist_ok=True)
    rope = {"rope_theta": model.shape.rope_theta, "rope_type": "default"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "rope_parameters": rope,
        **common_config(model.shape, end),
    }
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    for stale in directory.glob("*.safetensors*"):
        stale.unlink()
    parts = shards(rounded(model.state_dict()))
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_weights(part, directory / name)
        index |= dict.fromkeys(part, name)
    total = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def export_head(state: dict[str, Tensor], shape: LlamaShape, layers: list[int], directory: Path, end: int) -> None:
    """config.json and model.safetensors in the published EAGLE-3 layout (SafeAILab/EAGLE, loaded by vLLM as it is)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        **common_config(shape, end),
        "draft_vocab_size": state["lm_head.weight"].shape[0],
        "rope_scaling": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    # EAGLE's code reads the target's embedding only where this key is absent: it stands for another width alone.
    target_hidden_size = state["fc.weight"].shape[1] // len(layers)
    if target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = target_hidden_size
    write_json(directory / "config.json", config)
    save_weights(rounded(state), directory / "model.safetensors")


def bf16_exact(model: torch.nn.Module) -> None:
    """Rounds a model's weights in place to what is stored, so that everything after sees the shipped weights."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
