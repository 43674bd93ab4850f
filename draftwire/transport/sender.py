"""The sending end of a direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.tensors import WIRE_DTYPES, tensor_view
from draftwire.transport.segment import Segment
from draftwire.transport.span_room import Span, SpanRoom
from draftwire.v1 import draft_pb2 as pb


class Outgoing:
    """A tensor to be sent. Write `tensor`, call `seal`, and call `finish` before the message is sent.

    Call `give_up` instead of `finish` if the tensor is not sent.

    Attributes:
        tensor: Memory for the elements: in the segment, or private, pinned if the sender computes on a GPU.
        carrier: The carrier of the elements.
    """

    def __init__(
        self, tensor: torch.Tensor, device: torch.device, shared: tuple[Segment, SpanRoom, Span] | None = None
    ) -> None:
        """`shared` is the span of a tensor in shared memory."""
        self.tensor = tensor
        self.carrier = pb.CARRIER_BYTES if shared is None else shared[0].carrier
        self._device = device
        self._shared = shared
        self._event: torch.cuda.Event | None = None

    @property
    def offset(self) -> int | None:
        """Return the offset of the elements in the segment, bytes; None if they go in the message."""
        return None if self._shared is None else self._shared[2].offset

    def seal(self) -> None:
        """Declare that all writes have been issued on the calling thread's current stream; does not wait for them."""
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def keep(self, rows: int) -> None:
        """Send only the first `rows` rows of the tensor."""
        self.tensor = self.tensor[:rows]

    def give_up(self) -> None:
        """Release the room after the writes."""
        if self._shared is not None:
            self.wait()
            _, room, span = self._shared
            room.give_up(span)

    def announce(self, span: pb.SharedSpan) -> None:
        """Fill in the span of a tensor in shared memory before the tensor is written. The receiver releases the room
        then: call neither `finish` nor `give_up`."""
        assert self._shared is not None
        _, room, own = self._shared
        span.generation, span.offset = room.number(own), own.offset

    def take_back(self) -> None:
        """Undo `announce`, if its message was not sent and no tensor was numbered since."""
        assert self._shared is not None
        _, room, span = self._shared
        room.unnumber(span)

    def wait(self) -> None:
        """Wait for the writes."""
        if self._event is not None:
            self._event.synchronize()

    def finish(self, message: pb.Tensor) -> memoryview | None:
        """Wait for the writes, which have usually ended by then, and fill in the message.

        Call in the thread that sends the message, so that the engine's thread does not wait, and in the order in which
        the receiver claims the tensors.

        Returns:
            The elements to be inserted into `message.data`, see `encoding`; None if they are in shared memory.
        """
        self.wait()
        message.dtype = WIRE_DTYPES[self.tensor.dtype]
        message.shape.extend(self.tensor.shape)
        if self._shared is None:
            message.data = b""
            return tensor_view(self.tensor)
        _, room, span = self._shared
        message.span.generation, message.span.offset = room.number(span), span.offset
        return None


class TensorSender:
    """Finds room for tensors in the segment of a direction; tensors without room go in the message.

    `begin`, `release` and the methods of an `Outgoing` may be called from different threads.
    """

    def __init__(self, device: torch.device, segment: Segment | None = None) -> None:
        """`device` is where the tensors are computed."""
        self._device = device
        self._segment = segment
        self._room = SpanRoom(0 if segment is None else segment.size)

    @property
    def carrier(self) -> pb.Carrier:
        """Return the carrier of tensors for which there is room."""
        return pb.CARRIER_BYTES if self._segment is None else self._segment.carrier

    def begin(self, dtype: torch.dtype, shape: Sequence[int]) -> Outgoing:
        """Return room for a tensor of a message, in the segment or in private memory; never waits."""
        num_bytes = math.prod(shape) * dtype.itemsize
        span = self._room.allocate(num_bytes) if self._segment is not None and num_bytes else None
        if self._segment is None or span is None:
            pinned = self._device.type == "cuda" and num_bytes > 0
            return Outgoing(torch.empty(*shape, dtype=dtype, pin_memory=pinned), self._device)
        shared = self._segment, self._room, span
        return Outgoing(self._segment.tensor(span.offset, dtype, shape), self._device, shared)

    def release(self, generation: int, name: str) -> None:
        """Record that the receiver has read all spans up to `generation`.

        Raises:
            InvalidArgumentError: If the generation is impossible.
        """
        if self._segment is None and generation:
            raise InvalidArgumentError(name, generation, "no tensor was sent in shared memory")
        self._room.release(generation, name)
