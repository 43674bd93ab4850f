"""A board: memory of the host on which a verifier's device writes what it has drawn, for a drafter that looks there.

It belongs to the drafter and has a few places, which are written in turn. What is read from it is a copy and is not
trusted; a place that is written again while it is read gives numbers that no step has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from draftwire.carriers.cuda_segment import cuda_driver
from draftwire.carriers.segment import ALIGNMENT, Segment, SegmentError, check_span
from draftwire.errors import InvalidArgumentError
from draftwire.v1 import draft_pb2 as pb

# Steps that may have been launched and not been read: two groups that take turns, and as many again.
NUM_PLACES = 4
_WORD_BYTES = 4
_WORDS_BEFORE = ALIGNMENT // _WORD_BYTES

WriteValue = Callable[[int, int, int], None]  # stream, address, value


def board_bytes(max_sequences: int, max_drafts: int) -> int:
    """Size of the board for steps of so many sequences with up to max_drafts + 1 rows each."""
    numbers = _WORD_BYTES * max_sequences * (max_drafts + 2)
    return ALIGNMENT + NUM_PLACES * (ALIGNMENT + -(-numbers // ALIGNMENT) * ALIGNMENT)


class BoardWriter:
    """The verifier's end. Used by one thread."""

    def __init__(self, segment: Segment, device: torch.device, write_value: WriteValue | None = None) -> None:
        """`device` is what writes; `write_value` stands for the driver's function, for tests.

        Raises
        ------
        SegmentError
            When the device cannot write there.
        """
        self._device = device
        self._segment = segment
        if device.type == "cuda" and not segment.memory.is_pinned():
            raise SegmentError("the board is not pinned")
        if write_value is None and device.type == "cuda":
            write_value = cuda_driver().write_value
        self._write_value = write_value  # None on a CPU, whose writes are done when they are called
        self._place_bytes = (segment.size - ALIGNMENT) // NUM_PLACES // ALIGNMENT * ALIGNMENT
        self._generation = 0

    def post(self, numbers: torch.Tensor) -> pb.SharedSpan | None:
        """Has `numbers`, int32 [S, columns] on the device, written when the current stream comes to it, and then their
        generation; where they will be, or None where there is no room for so many."""
        if ALIGNMENT + numbers.nbytes > self._place_bytes:
            return None
        self._generation = self._generation % (2**32 - 1) + 1
        begin = ALIGNMENT + self._generation % NUM_PLACES * self._place_bytes
        offset = begin + ALIGNMENT
        memory = self._segment.memory
        self._segment.tensor(offset, torch.int32, tuple(numbers.shape)).copy_(numbers, non_blocking=True)
        if self._write_value is None:
            memory.numpy().view(np.uint32)[begin // _WORD_BYTES] = self._generation
        else:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            self._write_value(stream, memory.data_ptr() + begin, self._generation)
        return pb.SharedSpan(generation=self._generation, offset=offset)


class BoardReader:
    """The drafter's end."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.memory.numpy().view(np.uint32)

    def check(self, span: pb.SharedSpan, name: str, num_numbers: int) -> None:
        """
        Raises
        ------
        InvalidArgumentError
            Names the field `name` when no place of the board has so many numbers there.
        """
        check_span(f"{name}.offset", span.offset, _WORD_BYTES * num_numbers, self._words.nbytes)
        if not 1 <= span.generation < 2**32:
            raise InvalidArgumentError(f"{name}.generation", span.generation, f"allowed range [1, {2**32 - 1}]")

    def is_written(self, generation: int, offset: int) -> bool:
        """Whether the numbers at `offset` are there."""
        return self._words.item(offset // _WORD_BYTES - _WORDS_BEFORE) == generation

    def read(self, offset: int, shape: tuple[int, int]) -> np.ndarray:
        """A copy of the numbers, int32."""
        first = offset // _WORD_BYTES
        return self._words[first : first + shape[0] * shape[1]].copy().view(np.int32).reshape(shape)
