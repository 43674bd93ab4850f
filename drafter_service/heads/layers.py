"""Parts of a decoder layer over ragged rows. Projections with the same input are one product."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drafter_service.heads.fp8 import Fp8Product
from drafter_service.heads.operations import add_rms_norm, rms_norm, rotate_, silu_mul
from drafter_service.heads.rope import RotaryEmbedding
from drafter_service.heads.tensors import TensorSource
from draftwire.model.kv_cache import KVCache, RaggedBatch
from draftwire_kernels import paged_attention


@dataclass(frozen=True)
class LayerConfig:
    """Shapes and options that the layers of a head have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class Span:
    """The rows that a row of a layer sees; arguments of `draftwire_kernels.paged_attention`."""

    window: int | None = None
    causal: bool = True
    anchored: bool = False


class RMSNorm:
    """Root-mean-square norm of rows [T, H]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def largest(self) -> float:
        """Return an upper bound of the absolute output: an element is at most the root of the row's length, times its
        weight. Waits for the device."""
        return math.sqrt(len(self.weight)) * float(self.weight.abs().max())


class Projection:
    """x @ weight.T + bias.

    Attributes:
        weight, bias: [out, in], and [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._fp8: Fp8Product | None = None

    def use_fp8(self, *norms: RMSNorm) -> None:
        """Compute the product in 8 bits from now on. The inputs are parts of outputs of `norms`."""
        self._fp8 = Fp8Product(self.weight, max(norm.largest() for norm in norms))
        self.weight = self._fp8.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fp8 is None:
            return F.linear(x, self.weight, self.bias)
        out = self._fp8(x)
        return out if self.bias is None else out + self.bias


class Linear(Projection):
    """A projection of a checkpoint whose parts are stacked along the output: x @ cat(weights).T + cat(biases)."""

    def __init__(
        self, source: TensorSource, names: list[str], out_features: list[int], in_features: int, *, bias: bool
    ) -> None:
        parts = list(zip(names, out_features, strict=True))
        super().__init__(
            torch.cat([source.take(f"{name}.weight", size, in_features) for name, size in parts]),
            torch.cat([source.take(f"{name}.bias", size) for name, size in parts]) if bias else None,
        )


class Attention:
    """Grouped-query attention through the paged cache.

    Attributes:
        qkv: The projection of queries, keys and values.
        qk_norms: Weights [D] of the norms of queries and keys, and their epsilon; None without norms.
    """

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        config: LayerConfig,
        rotary: RotaryEmbedding,
        in_features: int,
        index: int,
        span: Span,
    ) -> None:
        self._rotary = rotary
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim, self._index, self._span = config.head_dim, index, span
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        widths = [heads * config.head_dim for heads in self._sizes]
        self.qkv = Linear(source, names, widths, in_features, bias=config.qkv_bias)
        self._out = Linear(source, [f"{prefix}.o_proj"], [config.hidden_size], widths[0], bias=config.output_bias)
        self.qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if config.qk_norm:
            q_weight, k_weight = (source.take(f"{prefix}.{name}_norm.weight", config.head_dim) for name in "qk")
            self.qk_norms = (q_weight, k_weight, config.norm_eps)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch) -> torch.Tensor:
        num_heads, num_kv_heads, _ = self._sizes
        heads = self.qkv(x).unflatten(-1, (-1, self._head_dim))
        rotated = heads[:, : num_heads + num_kv_heads]
        rotate_(rotated, num_heads, positions, self._rotary.cosines, self._rotary.sines, self.qk_norms)
        q, k, v = heads.split(self._sizes, 1)
        attended = paged_attention(
            q,
            k,
            v,
            cache.keys[self._index],
            cache.values[self._index],
            batch,
            scale=self._head_dim**-0.5,
            window=self._span.window,
            causal=self._span.causal,
            anchored=self._span.anchored,
        )
        return self._out(attended.flatten(1))


class GatedMLP:
    """down(silu(gate(x)) * up(x)).

    Attributes:
        gate_up: The projection of both.
    """

    def __init__(self, source: TensorSource, prefix: str, config: LayerConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = Linear(source, names, [inner, inner], hidden, bias=config.mlp_bias)
        self._down = Linear(source, [f"{prefix}.down_proj"], [hidden], inner, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(silu_mul(self.gate_up(x)))


class DecoderLayer:
    """Attention and MLP with their residuals. The caller norms the input of attention.

    Attributes:
        attention: The layer's attention.
    """

    def __init__(
        self,
        source: TensorSource,
        config: LayerConfig,
        rotary: RotaryEmbedding,
        in_features: int,
        index: int,
        span: Span,
    ) -> None:
        prefix = f"layers.{index}"
        self.attention = Attention(source, f"{prefix}.self_attn", config, rotary, in_features, index, span)
        weight = source.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self._mlp_norm = RMSNorm(weight, config.norm_eps)
        self._mlp = GatedMLP(source, f"{prefix}.mlp", config)

    def use_fp8(self, *input_norms: RMSNorm) -> None:
        """Compute products with normed inputs in 8 bits; without `input_norms` the layer's own input is not normed."""
        if input_norms:
            self.attention.qkv.use_fp8(*input_norms)
        self._mlp.gate_up.use_fp8(self._mlp_norm)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """Return [T, hidden] of the normed input `x` [T, in_features] and `residual` [T, hidden]."""
        attended = self.attention(x, positions, cache, batch)
        hidden, normed = add_rms_norm(residual, attended, self._mlp_norm.weight, self._mlp_norm.eps)
        return hidden + self._mlp(normed)
