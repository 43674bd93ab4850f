"""Bytes of the tensors that a drafter exchanges."""

from __future__ import annotations

from typing import Literal

from draftwire.v1 import draft_pb2 as pb

Tensor = Literal["features", "logits"]


class Traffic:
    """Counts bytes of all streams by carrier and tensor: the engine's thread counts, any thread reads."""

    def __init__(self) -> None:
        self._num_bytes: dict[tuple[pb.Carrier, Tensor], int] = {}

    def count(self, carrier: pb.Carrier, tensor: Tensor, num_bytes: int) -> None:
        """Counts features that were received or draft logits that are sent."""
        key = carrier, tensor
        self._num_bytes[key] = self._num_bytes.get(key, 0) + num_bytes

    def read(self) -> dict[tuple[pb.Carrier, Tensor], int]:
        """Bytes so far."""
        return self._num_bytes.copy()
