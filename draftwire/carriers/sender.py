"""The sending end of a direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftwire.carriers.ring import Ring
from draftwire.carriers.segment import Segment
from draftwire.errors import InvalidArgumentError
from draftwire.tensors import WIRE_DTYPES, tensor_bytes
from draftwire.v1 import draft_pb2 as pb


class Outgoing:
    """A tensor on its way: `tensor` is written, then `seal` is called, then `finish` before the message is sent.

    Attributes
    ----------
    tensor
        Where the elements go: in the segment, or in private memory, pinned where the sender computes on a GPU.
    carrier
        What will carry them.
    """

    def __init__(
        self, tensor: torch.Tensor, device: torch.device, segment: Segment | None, span: tuple[int, int]
    ) -> None:
        """`span` is (generation, offset) in the segment."""
        self.tensor = tensor
        self.carrier = pb.CARRIER_BYTES if segment is None else segment.carrier
        self._device = device
        self._segment = segment
        self._span = span
        self._event: torch.cuda.Event | None = None

    def seal(self) -> None:
        """All writes have been issued, on the current stream of the calling thread. Does not wait for them."""
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def finish(self, message: pb.Tensor) -> None:
        """Waits for the writes, which the GPU has done by then as a rule, and fills in the message.

        In the thread that sends the message, so that the engine's thread does not wait.
        """
        if self._event is not None:
            self._event.synchronize()
        message.dtype = WIRE_DTYPES[self.tensor.dtype]
        message.shape.extend(self.tensor.shape)
        if self._segment is None:
            message.data = tensor_bytes(self.tensor)
            return
        generation, offset = self._span
        self._segment.stamp(offset, generation, self.tensor.nbytes)
        message.span.generation, message.span.offset = generation, offset


class TensorSender:
    """Finds room for tensors in the segment of a direction; what has none goes in the message.

    `begin` and `release` may be called from different threads.
    """

    def __init__(self, device: torch.device, segment: Segment | None = None) -> None:
        """`device` is where the tensors are computed."""
        self._device = device
        self._segment = segment
        self._ring = Ring(0 if segment is None else segment.size)

    @property
    def carrier(self) -> pb.Carrier:
        """What carries the tensors that there is room for."""
        return pb.CARRIER_BYTES if self._segment is None else self._segment.carrier

    def begin(self, dtype: torch.dtype, shape: Sequence[int]) -> Outgoing:
        """Room for a tensor that goes into the next message; never waits.

        Tensors must be begun in the order in which the receiver meets them: message after message, field after field.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        span = self._ring.allocate(num_bytes) if self._segment is not None and num_bytes else None
        if self._segment is None or span is None:
            pinned = self._device.type == "cuda" and num_bytes > 0
            return Outgoing(torch.empty(*shape, dtype=dtype, pin_memory=pinned), self._device, None, (0, 0))
        return Outgoing(self._segment.tensor(span[1], dtype, shape), self._device, self._segment, span)

    def release(self, generation: int, name: str) -> None:
        """Takes note that the receiver has read all spans up to `generation`.

        Raises
        ------
        InvalidArgumentError
            Names the field `name` when that cannot be.
        """
        if self._segment is None and generation:
            raise InvalidArgumentError(name, generation, "no tensor was sent in shared memory")
        self._ring.release(generation, name)
