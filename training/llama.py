"""A Llama decoder with the parameter names of transformers' LlamaForCausalLM, written for fast training.

Every function takes and returns plain tensors; `Llama.states` gives the residual stream at the layer inputs, which is
what an EAGLE-3 head reads. Compared with transformers' own model in tests/test_training_llama.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwire.contract.errors import CheckpointError
from draftwire.model.checkpoints import load_tensors, read_config

# Token files and generated texts are uint16.
MAX_VOCAB_SIZE = 65536
# Keys of config.json that change the arithmetic, and the one value that this module computes: transformers' default.
_COMPUTED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the target, named as in transformers' LlamaConfig."""

    vocab_size: int = 2048
    hidden_size: int = 384
    intermediate_size: int = 896
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def as_dict(self) -> dict:
        return asdict(self)


def rotary_tables(shape: LlamaShape, positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [positions, head_dim] float32, in the half-split layout of transformers."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions, in float32, to x [..., T, head_dim]; cos and sin broadcast against it."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query projections; `width` is that of the input (twice the hidden size in an EAGLE-3 head)."""

    def __init__(self, shape: LlamaShape, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, heads, T, D], rotated k and v [B, kv_heads, T, D]."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection of [B, heads, T, D]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        x = x + self.self_attn.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.post_attention_layernorm(x))

    def extend(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], start: int) -> Tensor:
        """Rows at positions start, start + 1, ... after the `start` rows whose keys and values the cache holds."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        keys, values = cache  # [B, kv_heads, max_length, D], written in place
        length, end = x.shape[1], start + x.shape[1]
        keys[:, :, start:end], values[:, :, start:end] = k, v
        # The query heads of one KV head stand behind each other as rows, so that no key is copied.
        group = q.shape[1] // k.shape[1]
        rows = q.unflatten(1, (-1, group)).flatten(2, 3)  # [B, kv_heads, group * T, D]
        mask = None
        if length > 1:
            mask = torch.ones(length, end, dtype=torch.bool, device=x.device).tril(start).repeat(group, 1)
        attended = F.scaled_dot_product_attention(rows, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
        x = x + self.self_attn.merge(attended.unflatten(2, (group, length)).flatten(1, 2))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """Decoder with tied embeddings."""

    cos: Tensor  # [positions, head_dim]
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaModel(shape)
        cos, sin = rotary_tables(shape, shape.max_position_embeddings + 16, "cpu")
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data *= (2 * shape.num_hidden_layers) ** -0.5

    def states(self, tokens: Tensor) -> list[Tensor]:
        """Residual stream entering each layer and, last, leaving the final one; each [B, T, hidden]."""
        length = tokens.shape[1]
        states = [self.model.embed_tokens(tokens)]
        for layer in self.model.layers:
            states.append(layer(states[-1], self.cos[:length], self.sin[:length]))
        return states

    def logits_of(self, state: Tensor) -> Tensor:
        return F.linear(self.model.norm(state), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits_of(self.states(tokens)[-1])


def _read_shape(directory: Path) -> LlamaShape:
    """Return the shape of a directory whose model this module computes.

    Raises
    ------
    CheckpointError
        Names the key of config.json that it would get wrong.
    """
    config, where = read_config(directory), directory / "config.json"
    for key, allowed in _COMPUTED.items():
        if config.get(key) is not None and config[key] != allowed:
            raise CheckpointError(f"{where}: {key} = {config[key]!r} is not computed here; must be {allowed!r}")
    if config.get("tie_word_embeddings") is not True:  # transformers' default is False
        told = f"tie_word_embeddings = {config.get('tie_word_embeddings')!r}"
        raise CheckpointError(f"{where}: {told}: an untied lm_head.weight is not computed here")
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: lacks {missing[0]}")
    if config["vocab_size"] > MAX_VOCAB_SIZE:
        allowed = f"token ids are 16 bits here, so at most {MAX_VOCAB_SIZE}"
        raise CheckpointError(f"{where}: vocab_size = {config['vocab_size']}: {allowed}")
    defaults = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "rms_norm_eps": 1e-6,
    }
    given = {name: config[name] for name in LlamaShape.__dataclass_fields__ if config.get(name) is not None}
    return LlamaShape(**{**defaults, **given, "rope_theta": _rope_theta(config, where)})


def _rope_theta(config: Mapping[str, Any], where: Path) -> float:
    """Return the base of the rotary frequencies, which must be without any scaling."""
    theta = 10000.0 if config.get("rope_theta") is None else config["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"{where}: rope_type = {kind!r} ({key}) is not computed here; must be 'default'")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{where}: {key}.partial_rotary_factor is not computed here; must be 1.0")
        theta = rope.get("rope_theta", theta)
    return float(theta)


def load_llama(directory: Path, device: torch.device | str) -> Llama:
    """Return the model of a transformers directory as this module's class, in float32, in which bf16 weights are exact.

    Raises
    ------
    CheckpointError
        When the directory is damaged, or its model is not what this module computes.
    """
    model = Llama(_read_shape(directory))
    weights = load_tensors(directory)
    output = weights.pop("lm_head.weight", None)
    if output is not None and not torch.equal(output, weights.get("model.embed_tokens.weight", output[:0])):
        raise CheckpointError(f"{directory}: lm_head.weight is not the embedding, and only tied ones are computed here")
    for name, weight in weights.items():
        if not weight.is_floating_point() or weight.itemsize < 2:
            refused = f"tensor {name} is {weight.dtype}; quantised weights are not computed here"
            raise CheckpointError(f"{directory}: {refused}")
    try:
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except RuntimeError as error:  # tensors that are missing, unexpected or of another shape
        raise CheckpointError(f"{directory}: {error}") from error
    return model.to(device).eval()
