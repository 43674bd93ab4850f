"""Counters of the bytes between a verifier and its drafters."""

from __future__ import annotations

import math
import threading
from typing import Literal

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily

from draftwire.model.tensors import DTYPES
from draftwire.v1 import draft_pb2 as pb

# Carrier of a message: gRPC, or the socket between two engines of one host.
MessageCarrier = Literal["grpc", "direct"]
Direction = Literal["sent", "received"]
Content = Literal["message", "features", "logits", "fusion"]

# Dimensions of features and draft logits.
_NUM_DIMENSIONS = 2


class Traffic:
    """Counts every byte once, by carrier, direction and content; thread-safe.

    Messages are counted as they are encoded, without the frames of HTTP/2 and TLS. Tensors inside a message are counted
    separately, under the message's carrier.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: dict[tuple[str, Direction, Content], int] = {}

    def count_message(self, carrier: MessageCarrier, direction: Direction, message: Message, num_bytes: int) -> None:
        """Count a message that is encoded in `num_bytes`."""
        left = num_bytes
        for content, size in _tensors_inside(message):
            size = min(size, left)  # the size is the peer's claim, not checked yet
            left -= size
            self._count(carrier, direction, content, size)
        self._count(carrier, direction, "fusion" if isinstance(message, pb.FeatureFusionChunk) else "message", left)

    def count_tensor(self, carrier: pb.Carrier, direction: Direction, content: Content, num_bytes: int) -> None:
        """Count a tensor in shared memory; tensors in a message are counted with the message."""
        if carrier != pb.CARRIER_BYTES:
            self._count(pb.Carrier.Name(carrier).removeprefix("CARRIER_").lower(), direction, content, num_bytes)

    def _count(self, carrier: str, direction: Direction, content: Content, num_bytes: int) -> None:
        key = carrier, direction, content
        with self._lock:
            self._num_bytes[key] = self._num_bytes.get(key, 0) + num_bytes

    def collect(self) -> CounterMetricFamily:
        """Yield the metrics for Prometheus."""
        labels = ["carrier", "direction", "content"]
        family = CounterMetricFamily("draftwire_wire_bytes", "Bytes between verifiers and drafters.", labels=labels)
        with self._lock:
            counts = self._num_bytes.copy()
        for key, num_bytes in counts.items():
            family.add_metric(key, num_bytes)
        return family


def _tensors_inside(message: Message) -> list[tuple[Content, int]]:
    if isinstance(message, pb.DraftRequest):
        return [("features", _data_bytes(message.step.features))]
    if isinstance(message, pb.DraftResponse):
        drafts = message.drafts
        return [("logits", _data_bytes(drafts.logits)), ("logits", _data_bytes(drafts.logits_token_ids))]
    return []


def _data_bytes(tensor: pb.Tensor) -> int:
    """Return the size of a message's elements from the shape, because reading the elements would copy them.

    The shape is not checked yet. The product of a million dimensions would take minutes.
    """
    if tensor.WhichOneof("storage") != "data" or tensor.dtype not in DTYPES or len(tensor.shape) != _NUM_DIMENSIONS:
        return 0
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
