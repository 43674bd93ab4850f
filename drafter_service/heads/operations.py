"""The small operations of a head's layer: torch on a CPU, one Triton kernel each on CUDA."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from draftwire.model import fusion

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `draftwire.model.fusion.rms_norm` of rows [T, H]."""
    if uses_triton(x):
        from drafter_service.heads import kernels

        return kernels.rms_norm(x, weight, eps)
    return fusion.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of two tensors [T, H], and its `rms_norm`."""
    if uses_triton(x):
        from drafter_service.heads import kernels

        return kernels.add_rms_norm(x, added, weight, eps)
    total = x + added
    return total, rms_norm(total, weight, eps)


def first_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    embedding_norm: tuple[torch.Tensor, float],
    g: torch.Tensor,
    g_norm: tuple[torch.Tensor, float],
) -> torch.Tensor:
    """Return the normed embeddings of `tokens` [T] int64, joined with the normed states `g` [T, H]: [T, 2 H].

    A norm is given as its weight [H] and epsilon.
    """
    if uses_triton(g):
        from drafter_service.heads import kernels

        return kernels.first_input(tokens, embedding, embedding_norm, g, g_norm)
    return torch.cat((rms_norm(F.embedding(tokens, embedding), *embedding_norm), rms_norm(g, *g_norm)), -1)


def rotate_(
    x: torch.Tensor,
    num_q_heads: int,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Apply rotary embedding to queries and keys by halves, as in Llama, in place.

    Args:
        x: [T, H + KV, D] of unit stride within a row: the queries' heads, then the keys'.
        positions: [T] int64.
        cosines, sines: [positions, D / 2].
        norms: Weights [D] of root-mean-square norms of queries and keys before the rotation, and their epsilon.
    """
    if uses_triton(x):
        from drafter_service.heads import kernels

        kernels.rotate_(x, num_q_heads, positions, cosines, sines, norms)
        return
    if norms is not None:
        q_weight, k_weight, eps = norms
        x[:, :num_q_heads] = rms_norm(x[:, :num_q_heads], q_weight, eps)
        x[:, num_q_heads:] = rms_norm(x[:, num_q_heads:], k_weight, eps)
    cosine, sine = cosines[positions, None], sines[positions, None]
    first, second = (half.clone() for half in x.chunk(2, -1))
    x[:] = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def store_keys_(
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Norm and rotate keys, and write keys and values into one layer of a paged cache. No row of the batch reads them.

    Args:
        kv: [T, 2, KV, D] of unit stride within a row: projected keys and values.
        positions, slots: [T] int64: rotary positions, and slots of the cache.
        cosines, sines: [positions, D / 2].
        norm: Weight [D] and epsilon of the keys' root-mean-square norm; None for none.
        keys, values: [cache slots, KV, D]; changed in place.
    """
    if uses_triton(kv):
        from drafter_service.heads import kernels

        kernels.store_keys_(kv, positions, slots, cosines, sines, norm, keys, values)
        return
    key = kv[:, 0].clone()
    rotate_(key, 0, positions, cosines, sines, None if norm is None else (norm[0], *norm))
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, kv[:, 1])


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, I], of rows [gate, up], [T, 2 I]."""
    if uses_triton(x):
        from drafter_service.heads import kernels

        return kernels.silu_mul(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def quantise(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x / scale as float8 e4m3, rounded to nearest; larger values become the largest float8."""
    if uses_triton(x):
        from drafter_service.heads import kernels

        return kernels.quantise(x, scale)
    return (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def uses_triton(x: torch.Tensor) -> bool:
    """Return whether Triton kernels are used for this tensor."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
