"""Feature fusion: the layer from the target's features to the head's states, run by the drafter or the verifier."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from draftwire.contract.errors import InvalidArgumentError, MismatchError
from draftwire.model.tensors import DTYPES, tensor_bytes
from draftwire.v1 import draft_pb2 as pb

CHUNK_BYTES = 4 << 20
_DIGEST_BYTES = 16

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root-mean-square norm of rows [T, H], as in Llama: float32 inside, `weight` [H] in the rows' dtype."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class FeatureFusion:
    """A linear layer without bias, with optional root-mean-square norms before it: [T, in] -> [T, out].

    Attributes:
        weight: [out, in], in the head's dtype.
        norms: Weights of the norms: none, one [in], or one [in / n] for each of n layers' features.
        eps: Epsilon of the norms.
    """

    def __init__(
        self, weight: torch.Tensor, norms: list[torch.Tensor] | None = None, eps: float = 0.0, norm: Norm = rms_norm
    ) -> None:
        """`norm` computes a norm from rows, a weight and an epsilon."""
        self.weight = weight
        self.norms = norms or []
        self.eps = eps
        self._norm = norm

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states of rows of features."""
        if self.norms:
            chunks = features.chunk(len(self.norms), -1)
            normed = [self._norm(chunk, weight, self.eps) for chunk, weight in zip(chunks, self.norms, strict=True)]
            features = normed[0] if len(normed) == 1 else torch.cat(normed, -1)
        return F.linear(features, self.weight)

    def chunks(self) -> Iterator[bytes]:
        """Yield all weights as bytes: norms first, then rows of the layer."""
        for norm in self.norms:
            yield tensor_bytes(norm)
        rows = max(CHUNK_BYTES // self.weight[:1].nbytes, 1)
        for part in self.weight.split(rows):
            yield tensor_bytes(part)

    def describe(self) -> pb.FeatureFusion:
        """Return the wire form, without the weights."""
        digest = _digest(self.chunks())
        return pb.FeatureFusion(width=len(self.weight), num_norms=len(self.norms), norm_eps=self.eps, digest=digest)


def fusion_bytes(fusion: pb.FeatureFusion, features: pb.FeatureSpec) -> int:
    """Return the size of the weights in bytes.

    Args:
        fusion, features: The drafter's description; only the features' width and dtype are trusted.

    Raises:
        MismatchError: If the description is invalid; names its values.
    """
    num_layers = len(features.layers)
    wrong = (
        not 1 <= fusion.width <= features.width
        or fusion.num_norms not in (0, 1, num_layers)
        or not (math.isfinite(fusion.norm_eps) and fusion.norm_eps >= 0)
    )
    if wrong:
        raise MismatchError(
            f"fusion does not fit: width {fusion.width}, num_norms {fusion.num_norms}, norm_eps {fusion.norm_eps}; "
            f"allowed: width in [1, {features.width}], num_norms 0, 1 or {num_layers}, norm_eps in [0, inf)"
        )
    elements = features.width * (fusion.width + (fusion.num_norms > 0))
    return elements * DTYPES[features.dtype].itemsize


def load_fusion(
    fusion: pb.FeatureFusion, features: pb.FeatureSpec, data: bytearray, device: torch.device
) -> FeatureFusion:
    """Return the fusion with weights from a drafter.

    Raises:
        MismatchError: If the description is invalid.
        InvalidArgumentError: If the weights do not have the size or digest of the description.
    """
    size = fusion_bytes(fusion, features)
    if len(data) != size:
        raise InvalidArgumentError("fusion.data", f"{len(data)} bytes", f"must be {size} bytes")
    digest = _digest([data])
    if digest != fusion.digest:
        raise InvalidArgumentError("fusion.digest", fusion.digest, f"the weights have {digest}")
    weights = torch.frombuffer(data, dtype=DTYPES[features.dtype]).to(device)
    norms = []
    if fusion.num_norms:
        norms = list(weights[: features.width].split(features.width // fusion.num_norms))
        weights = weights[features.width :]
    return FeatureFusion(weights.view(fusion.width, features.width), norms, fusion.norm_eps)


def _digest(chunks: Iterable[bytes | bytearray]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
