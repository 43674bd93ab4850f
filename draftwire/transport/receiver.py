"""The receiving end of a direction."""

from __future__ import annotations

import math
import threading
from collections import deque

import torch

from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.tensors import check_tensor, decode_tensor
from draftwire.transport.segment import Segment, check_span
from draftwire.v1 import draft_pb2 as pb


class Incoming:
    """A tensor of a checked message. Call `load` for a copy, or read `tensor` and then call `finish`.

    Attributes:
        tensor: The elements, read-only: in the segment on its device, or in the message's bytes on the CPU. The sender
            may change shared memory at any time, so a value must be copied before it is checked.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device, segment: Segment | None = None) -> None:
        """`device` is where the tensor is wanted."""
        self.tensor = tensor
        self._device = device
        self._segment = segment  # keeps the memory mapped
        self._is_read = False
        self._event: torch.cuda.Event | None = None

    @property
    def carrier(self) -> pb.Carrier:
        """Return the carrier of the tensor."""
        return pb.CARRIER_BYTES if self._segment is None else self._segment.carrier

    @property
    def num_bytes(self) -> int:
        """Return the size of the elements, bytes."""
        return self.tensor.nbytes

    def load(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the tensor on `device`, by default the receiver's, as a copy if it is in shared memory. Call once.

        On a GPU the copy runs on the calling thread's current stream, and the host does not wait for it. A tensor that
        came in the message of a receiver on the CPU is read-only: it shares the message's bytes.
        """
        device = device or self._device
        if self._segment is None:
            return self.tensor.to(device)
        copy = self.tensor.to(device, non_blocking=device.type == "cuda", copy=True)
        self.finish(device)
        return copy

    def finish(self, device: torch.device | None = None) -> None:
        """Declare that all reads have been issued: on a GPU on the calling thread's current stream.

        Does not wait for the reads. Later calls have no effect.
        """
        device = device or self._device
        if self._segment is None or self._is_read:
            return
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self._is_read = True

    @property
    def is_read(self) -> bool:
        """Return whether the shared memory may be written again."""
        return self._is_read and (self._event is None or self._event.query())


class TensorReceiver:
    """Checks the tensors of untrusted messages and finds their elements.

    `claim` must be called for the tensors in the order in which they were finished. `claim`, `generation_read` and the
    methods of an `Incoming` may be called from different threads.
    """

    def __init__(self, device: torch.device, segment: Segment | None = None) -> None:
        """`device` is where the tensors are wanted."""
        self._device = device
        self._segment = segment
        self._lock = threading.Lock()
        self._unread: deque[tuple[int, int, Incoming]] = deque()  # (begin, end, tensor) of spans, oldest first
        self._last_generation = 0

    @property
    def carrier(self) -> pb.Carrier:
        """Return the carrier of tensors for which the sender has room."""
        return pb.CARRIER_BYTES if self._segment is None else self._segment.carrier

    @property
    def generation_read(self) -> int:
        """Return the generation up to which all spans have been read."""
        with self._lock:
            while self._unread and self._unread[0][2].is_read:
                self._unread.popleft()
            return self._last_generation - len(self._unread)

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Incoming:
        """Return an empty tensor for a missing optional one."""
        return Incoming(torch.empty(shape, dtype=dtype), self._device)

    def claim(self, message: pb.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Incoming:
        """Return the tensor of a message; parameters and errors as of `draftwire.model.tensors.decode_tensor`."""
        if message.WhichOneof("storage") != "span":
            return Incoming(decode_tensor(message, name, dtype, shape), self._device)
        given = check_tensor(message, name, dtype, shape)
        return self.claim_span(message.span, f"{name}.span", dtype, given)

    def claim_span(self, span: pb.SharedSpan, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Incoming:
        """Return the tensor of a span, which the sender's device may still write; errors as of `claim`."""
        if self._segment is None:
            raise InvalidArgumentError(name, span.offset, "no shared memory was agreed on")
        segment, size = self._segment, math.prod(shape) * dtype.itemsize
        begin, end = span.offset, span.offset + size
        with self._lock:
            if span.generation != self._last_generation + 1:
                raise InvalidArgumentError(
                    f"{name}.generation", span.generation, f"must be {self._last_generation + 1}: it rises by 1"
                )
            check_span(f"{name}.offset", begin, size, segment.size)
            for other_begin, other_end, _ in self._unread:
                if begin < other_end and other_begin < end:
                    raise InvalidArgumentError(f"{name}.offset", begin, "lies in a span that has not been read yet")
            incoming = Incoming(segment.tensor(begin, dtype, shape), self._device, segment)
            self._last_generation += 1
            self._unread.append((begin, end, incoming))
        return incoming
