"""A board: memory of the host on which two devices write what the other side's host looks for, without a message.

It belongs to the drafter. The verifier's device writes what it has drawn in one of a few places, in turn, and the
drafter's the drafts after that in the place beside it. What is read is a copy and is not trusted; a place that is
written again while it is read gives numbers that no step has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from draftwire.carriers.cuda_segment import cuda_driver
from draftwire.carriers.segment import ALIGNMENT, Segment, SegmentError, check_span
from draftwire.errors import InvalidArgumentError
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)

# Steps that may have been launched and not been read: two groups that take turns, and as many again.
NUM_PLACES = 4
_WORD_BYTES = 4
_WORDS_BEFORE = ALIGNMENT // _WORD_BYTES

WriteValue = Callable[[int, int, int], None]  # stream, address, value


def board_bytes(max_sequences: int, max_drafts: int) -> int:
    """Size of the board for steps of so many sequences with up to max_drafts + 1 rows each."""
    numbers = _WORD_BYTES * max_sequences * (max_drafts + 2)
    return ALIGNMENT + 2 * NUM_PLACES * (ALIGNMENT + -(-numbers // ALIGNMENT) * ALIGNMENT)


class _Board:
    """What both ends do: numbers stand at an offset, and 64 bytes before them their generation, which comes last."""

    def __init__(self, segment: Segment, device: torch.device, write_value: WriteValue | None) -> None:
        """`device` is what writes; `write_value` stands for the driver's function, for tests."""
        self._device = device
        self._segment = segment
        self._words = segment.memory.numpy().view(np.uint32)
        self._place_bytes = (segment.size - ALIGNMENT) // (2 * NUM_PLACES) // ALIGNMENT * ALIGNMENT
        # From the place of what was drawn to that of the drafts after it.
        self._beside = NUM_PLACES * self._place_bytes
        self._write_value = write_value  # None on a CPU, whose writes are done when they are called

    def _write(self, numbers: torch.Tensor, offset: int, generation: int) -> None:
        """Has int32 numbers of the device written when the current stream comes to it, and then their generation."""
        self._segment.tensor(offset, torch.int32, tuple(numbers.shape)).copy_(numbers, non_blocking=True)
        if self._write_value is None:
            self._words[offset // _WORD_BYTES - _WORDS_BEFORE] = generation
        else:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            self._write_value(stream, self._segment.memory.data_ptr() + offset - ALIGNMENT, generation)

    def _is_written(self, offset: int, generation: int) -> bool:
        return self._words.item(offset // _WORD_BYTES - _WORDS_BEFORE) == generation

    def _read(self, offset: int, shape: tuple[int, int]) -> np.ndarray:
        first = offset // _WORD_BYTES
        return self._words[first : first + shape[0] * shape[1]].copy().view(np.int32).reshape(shape)


class VerifierBoard(_Board):
    """The verifier's end. Used by one thread."""

    def __init__(self, segment: Segment, device: torch.device, write_value: WriteValue | None = None) -> None:
        """`device` is what draws; `write_value` stands for the driver's function, for tests.

        Raises
        ------
        SegmentError
            When the device cannot write there.
        """
        if device.type == "cuda" and not segment.memory.is_pinned():
            raise SegmentError("the board is not pinned")
        if write_value is None and device.type == "cuda":
            write_value = cuda_driver().write_value
        super().__init__(segment, device, write_value)
        self._generation = 0

    def post(self, numbers: torch.Tensor) -> pb.SharedSpan | None:
        """Has `numbers`, int32 [S, columns] on the device, written when the current stream comes to it, and then their
        generation; where they will be, or None where there is no room for so many."""
        if ALIGNMENT + numbers.nbytes > self._place_bytes:
            return None
        self._generation = self._generation % (2**32 - 1) + 1
        offset = 2 * ALIGNMENT + self._generation % NUM_PLACES * self._place_bytes
        self._write(numbers, offset, self._generation)
        return pb.SharedSpan(generation=self._generation, offset=offset)

    def has_drafts(self, drawn: pb.SharedSpan) -> bool:
        """Whether the drafts after what was posted there have come."""
        return self._is_written(drawn.offset + self._beside, drawn.generation)

    def drafts(self, drawn: pb.SharedSpan, shape: tuple[int, int]) -> np.ndarray:
        """A copy of them, int32 [S, k]; no more numbers than were posted."""
        return self._read(drawn.offset + self._beside, shape)


class DrafterBoard(_Board):
    """The drafter's end. Used by one thread."""

    def __init__(self, segment: Segment, device: torch.device, write_value: WriteValue | None = None) -> None:
        """`device` is what drafts; `write_value` stands for the driver's function, for tests."""
        self._takes_drafts = device.type != "cuda" or bool(segment.memory.is_pinned())
        if write_value is None and device.type == "cuda":
            try:
                write_value = cuda_driver().write_value
            except SegmentError as error:
                self._leave(error)
        super().__init__(segment, device, write_value)

    def check(self, span: pb.SharedSpan, name: str, num_numbers: int) -> None:
        """
        Raises
        ------
        InvalidArgumentError
            Names the field `name` when no place of what is drawn has so many numbers there.
        """
        check_span(f"{name}.offset", span.offset, _WORD_BYTES * num_numbers, ALIGNMENT + self._beside)
        if not 1 <= span.generation < 2**32:
            raise InvalidArgumentError(f"{name}.generation", span.generation, f"allowed range [1, {2**32 - 1}]")

    def is_written(self, generation: int, offset: int) -> bool:
        """Whether the numbers at `offset` are there."""
        return self._is_written(offset, generation)

    def read(self, offset: int, shape: tuple[int, int]) -> np.ndarray:
        """A copy of the numbers, int32."""
        return self._read(offset, shape)

    def answer(self, generation: int, offset: int, drafts: torch.Tensor) -> None:
        """Has the drafts after the numbers of a span that was checked, int32 [S, k] on the device, written beside
        them when the current stream comes to it; without effect where there is no room, or the device cannot write."""
        beside = offset + self._beside
        if self._takes_drafts and beside + drafts.nbytes <= self._segment.size:
            try:
                self._write(drafts, beside, generation)
            except SegmentError as error:
                self._leave(error)

    def _leave(self, error: SegmentError) -> None:
        logger.warning("drafts are not written on the board: %s", error)
        self._takes_drafts = False
