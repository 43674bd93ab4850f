"""Shape and layers of draft heads, with the parameter names of transformers' Llama and Qwen3."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head's layers, named as in transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def resized(self, **sizes: int) -> "HeadShape":
        """Return the shape with other sizes."""
        return replace(self, **sizes)


def shape_of(config: Any, **sizes: int) -> HeadShape:
    """Return the shape of a target's layers, with `sizes` replaced.

    The rotary base is the target's, without its scaling for long contexts.
    """
    heads = config.num_attention_heads
    shape = HeadShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
    )
    return shape.resized(**sizes)


def rotary_tables(shape: HeadShape, positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, head_dim] float32, in the half-split layout of transformers."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions, in float32, to x [..., T, head_dim]; cos and sin broadcast to its shape."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight.to(x.dtype)


class Fusion(nn.Linear):
    """A projection of the target's states, trained on states scaled to a root mean square of 1 in every channel.

    Channels and layers of a target differ by factors of a hundred, and a few large channels would dominate the
    gradient. The export folds the scale into the weight.
    """

    scale: Tensor  # [fused_width] float32

    def __init__(self, fused_width: int, hidden_size: int) -> None:
        super().__init__(fused_width, hidden_size, bias=False)
        self.register_buffer("scale", torch.ones(fused_width))

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.folded())

    def folded(self) -> Tensor:
        """Return the weight for unscaled states, [hidden_size, fused_width]."""
        return self.weight / self.scale

    def measure(self, states: Tensor) -> None:
        """Set the scale to the root mean square of states [..., fused_width]."""
        squares = states.float().flatten(0, -2).square().mean(0)
        self.scale.copy_(squares.sqrt().clamp_min(1e-6))


class MLP(nn.Module):
    """MLP with a SiLU gate."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of grouped-query attention; an EAGLE-3 head's input `width` is twice the hidden size."""

    def __init__(self, shape: HeadShape, width: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated queries [B, heads, T, D] of x [B, T, width]; cos and sin broadcast to their shape."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        q = self.q_norm(q) if self.qk_norm else q
        return rotate(q.transpose(1, 2), cos, sin)

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, heads, T, D], those of a key-value head repeated for its query heads."""
        group = self.heads // self.kv_heads
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        k = self.k_norm(k) if self.qk_norm else k
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        k, v = rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def merge(self, heads: Tensor) -> Tensor:
        """Return the output projection [B, T, hidden] of heads [B, heads, T, D]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


def initialise(model: nn.Module) -> None:
    """Draw all matrices from a normal distribution with standard deviation 0.02."""
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02)
