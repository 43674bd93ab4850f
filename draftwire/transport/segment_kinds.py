"""Creation of segments by carrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwire.transport.carriers import carrier_name
from draftwire.transport.cuda_segment import CudaSegment
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.segment import ALIGNMENT, MAX_SEGMENT_BYTES, Segment, SegmentError
from draftwire.v1 import draft_pb2 as pb

_KINDS: dict[int, type[Segment]] = {kind.carrier: kind for kind in (HostSegment, CudaSegment)}


def create_segment(carrier: pb.Carrier, size: int, device: torch.device) -> tuple[Segment, list[int]]:
    return _kind(carrier).create(size, device)


def attach_segment(carrier: pb.Carrier, fds: Sequence[int], size: int, device: torch.device) -> Segment:
    if not 2 * ALIGNMENT <= size <= MAX_SEGMENT_BYTES:
        raise SegmentError(f"size = {size}: allowed range [{2 * ALIGNMENT}, {MAX_SEGMENT_BYTES}]")
    return _kind(carrier).attach(fds, size, device)


def _kind(carrier: pb.Carrier) -> type[Segment]:
    if carrier not in _KINDS:
        raise SegmentError(f"there are no segments of {carrier_name(carrier)}")
    return _KINDS[carrier]
