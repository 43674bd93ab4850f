"""The sending end of a direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.tensors import WIRE_DTYPES, tensor_view
from draftwire.transport.segment import Segment
from draftwire.transport.span_room import Span, SpanRoom
from draftwire.v1 import draft_pb2 as pb


class Outgoing:
    """A tensor on its way: `tensor` is written, then `seal` is called, then `finish` before the message is sent.

    Or `give_up` in the place of `finish`, when it is not to be sent.

    Attributes
    ----------
    tensor
        Where the elements go: in the segment, or in private memory, pinned where the sender computes on a GPU.
    carrier
        What will carry them.
    """

    def __init__(
        self, tensor: torch.Tensor, device: torch.device, shared: tuple[Segment, SpanRoom, Span] | None = None
    ) -> None:
        """`shared` is where the tensor is, when it is in shared memory."""
        self.tensor = tensor
        self.carrier = pb.CARRIER_BYTES if shared is None else shared[0].carrier
        self._device = device
        self._shared = shared
        self._event: torch.cuda.Event | None = None

    @property
    def offset(self) -> int | None:
        """Where the elements begin in the segment, bytes; None when they go in the message."""
        return None if self._shared is None else self._shared[2].offset

    def seal(self) -> None:
        """All writes have been issued, on the current stream of the calling thread. Does not wait for them."""
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def keep(self, rows: int) -> None:
        """Sends the first `rows` rows of the tensor alone."""
        self.tensor = self.tensor[:rows]

    def give_up(self) -> None:
        """Gives the room back; waits for the writes."""
        if self._shared is not None:
            self.wait()
            _, room, span = self._shared
            room.give_up(span)

    def announce(self, span: pb.SharedSpan) -> None:
        """Fills in the span of a tensor in shared memory that is still to be written. It is then the receiver that
        gives the room back: neither `finish` nor `give_up` is called."""
        assert self._shared is not None
        _, room, own = self._shared
        span.generation, span.offset = room.number(own), own.offset

    def take_back(self) -> None:
        """Undoes `announce`: its message has not been sent, and no tensor was numbered since."""
        assert self._shared is not None
        _, room, span = self._shared
        room.unnumber(span)

    def wait(self) -> None:
        """Waits for the writes."""
        if self._event is not None:
            self._event.synchronize()

    def finish(self, message: pb.Tensor) -> memoryview | None:
        """Waits for the writes, which the GPU has done by then as a rule, and fills in the message.

        In the thread that sends the message, so that the engine's thread does not wait; message after message, field
        after field, as the receiver meets the tensors.

        Returns
        -------
        The elements where they are still to be put into `message.data`, see `encoding`; None where they are in shared
        memory.
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
    """Finds room for tensors in the segment of a direction; what has none goes in the message.

    `begin`, `release` and the methods of what is begun may be called from different threads.
    """

    def __init__(self, device: torch.device, segment: Segment | None = None) -> None:
        """`device` is where the tensors are computed."""
        self._device = device
        self._segment = segment
        self._room = SpanRoom(0 if segment is None else segment.size)

    @property
    def carrier(self) -> pb.Carrier:
        """What carries the tensors that there is room for."""
        return pb.CARRIER_BYTES if self._segment is None else self._segment.carrier

    def begin(self, dtype: torch.dtype, shape: Sequence[int]) -> Outgoing:
        """Room for a tensor that goes into a message; never waits."""
        num_bytes = math.prod(shape) * dtype.itemsize
        span = self._room.allocate(num_bytes) if self._segment is not None and num_bytes else None
        if self._segment is None or span is None:
            pinned = self._device.type == "cuda" and num_bytes > 0
            return Outgoing(torch.empty(*shape, dtype=dtype, pin_memory=pinned), self._device)
        shared = self._segment, self._room, span
        return Outgoing(self._segment.tensor(span.offset, dtype, shape), self._device, shared)

    def release(self, generation: int, name: str) -> None:
        """Takes note that the receiver has read all spans up to `generation`.

        Raises
        ------
        InvalidArgumentError
            Names the field `name` when that cannot be.
        """
        if self._segment is None and generation:
            raise InvalidArgumentError(name, generation, "no tensor was sent in shared memory")
        self._room.release(generation, name)
