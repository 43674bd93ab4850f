"""Numbers that one side's device writes and the other side sees without a message."""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest
import torch

from draftwire.carriers import DrafterBoard, SegmentError, VerifierBoard, board_bytes
from draftwire.carriers.board import NUM_PLACES
from draftwire.carriers.host_segment import HostSegment
from draftwire.errors import InvalidArgumentError
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")


def pair(size: int, device: torch.device = CPU) -> tuple[VerifierBoard, DrafterBoard]:
    """Both ends, each with a mapping of its own."""
    owned, fds = HostSegment.create(size, device)
    try:
        return VerifierBoard(HostSegment.attach(fds, size, device), device), DrafterBoard(owned, device)
    finally:
        for fd in fds:
            os.close(fd)


def test_numbers_are_read_as_they_were_posted():
    writer, reader = pair(board_bytes(3, 4))
    for turn in range(3 * NUM_PLACES):
        numbers = torch.arange(18, dtype=torch.int32).view(3, 6) - turn
        span = writer.post(numbers)
        reader.check(span, "drawn", 18)
        assert reader.is_written(span.generation, span.offset)
        assert reader.read(span.offset, (3, 6)).tolist() == numbers.tolist()


def test_a_place_tells_which_numbers_it_has():
    writer, reader = pair(board_bytes(1, 4))
    spans = [writer.post(torch.full((1, 6), turn, dtype=torch.int32)) for turn in range(NUM_PLACES + 1)]
    assert spans[0].offset == spans[-1].offset
    assert [reader.is_written(span.generation, span.offset) for span in spans] == [False] + [True] * NUM_PLACES


def test_drafts_stand_beside_what_they_come_after():
    writer, reader = pair(board_bytes(3, 4))
    spans = []
    for turn in range(3 * NUM_PLACES):
        drawn = torch.full((3, 6), -turn, dtype=torch.int32)
        span = writer.post(drawn)
        assert not writer.has_drafts(span)
        drafts = torch.arange(12, dtype=torch.int32).view(3, 4) + turn
        reader.answer(span.generation, span.offset, drafts)
        assert writer.has_drafts(span)
        assert writer.drafts(span, (3, 4)).tolist() == drafts.tolist()
        assert reader.read(span.offset, (3, 6)).tolist() == drawn.tolist()
        spans.append(span)
    assert [writer.has_drafts(span) for span in spans[-NUM_PLACES:]] == [True] * NUM_PLACES
    assert not any(writer.has_drafts(span) for span in spans[:-NUM_PLACES])


def test_drafts_are_a_part_of_rows_where_a_drafter_makes_more():
    writer, reader = pair(board_bytes(3, 4))
    span = writer.post(torch.zeros(3, 6, dtype=torch.int32))
    made = torch.arange(32, dtype=torch.int32).view(4, 8)
    reader.answer(span.generation, span.offset, made[:3, :4])
    assert writer.drafts(span, (3, 4)).tolist() == made[:3, :4].tolist()


def test_drafts_past_the_end_of_the_board_are_not_written():
    """A verifier may name any place that has room for what it draws."""
    writer, reader = pair(board_bytes(1, 4))
    span = pb.SharedSpan(generation=1, offset=64 * 2 * NUM_PLACES)
    reader.check(span, "drawn", 2)
    reader.answer(1, span.offset, torch.ones(1, 17, dtype=torch.int32))
    assert not writer.has_drafts(span)
    reader.answer(1, span.offset, torch.ones(1, 16, dtype=torch.int32))
    assert writer.has_drafts(span)


def test_a_device_that_cannot_write_drafts_is_left_alone(caplog):
    segment, calls = HostSegment.unshared(board_bytes(1, 4), CPU), []

    def fail(*call: int) -> None:
        calls.append(call)
        raise SegmentError("not here")

    board = DrafterBoard(segment, CPU, fail)
    for _ in range(3):
        board.answer(1, 128, torch.ones(1, 4, dtype=torch.int32))
    assert len(calls) == 1
    assert "drafts are not written on the board: not here" in caplog.text


def test_the_generation_comes_behind_the_numbers():
    seen = []
    segment = HostSegment.unshared(board_bytes(2, 2), CPU)
    reader = DrafterBoard(segment, CPU)
    numbers = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    place = board_bytes(0, 2)  # the nonce's bytes, and the places' generations, one for each side

    def note(_stream: int, address: int, value: int) -> None:
        offset = address - segment.memory.data_ptr() + 64
        seen.append((value, reader.read(offset, (2, 4)).tolist()))

    assert place == 64 * (1 + 2 * NUM_PLACES)
    VerifierBoard(segment, CPU, note).post(numbers)
    assert seen == [(1, numbers.tolist())]


def test_no_end_keeps_its_memory():
    """Python looks for cycles seldom, and what is shared must be given back at once."""
    writer, reader = pair(board_bytes(3, 4))
    segment = weakref.ref(writer._segment)
    writer.post(torch.zeros(3, 6, dtype=torch.int32))
    gc.collect()
    gc.disable()
    try:
        del writer, reader
        assert segment() is None
    finally:
        gc.enable()


def test_more_numbers_than_a_place_has_are_not_posted():
    writer, _ = pair(board_bytes(3, 4))
    assert writer.post(torch.zeros(64, 6, dtype=torch.int32)) is None


@pytest.mark.parametrize(
    ("offset", "generation", "message"),
    [
        (64, 1, r"drawn.offset = 64: .* must lie in \[128, "),
        (130, 1, "from a multiple of 64 on"),
        (1 << 30, 1, "drawn.offset"),
        (128, 0, r"drawn.generation = 0: allowed range \[1, 4294967295\]"),
        (128, 1 << 32, "drawn.generation"),
    ],
)
def test_a_place_that_there_is_not_is_named(offset, generation, message):
    _, reader = pair(board_bytes(3, 4))
    with pytest.raises(InvalidArgumentError, match=message):
        reader.check(pb.SharedSpan(generation=generation, offset=offset), "drawn", 18)


@pytest.mark.gpu
def test_a_device_writes_when_its_stream_comes_to_it():
    device = torch.device("cuda", 0)
    writer, reader = pair(board_bytes(64, 4), device)
    for _ in range(20):
        numbers = torch.randint(-9, 9, (64, 6), dtype=torch.int32, device=device)
        torch.cuda._sleep(50_000_000)  # clock cycles, some 25 ms
        span = writer.post(numbers)
        assert not reader.is_written(span.generation, span.offset)
        deadline = time.monotonic() + 5
        while not reader.is_written(span.generation, span.offset):
            assert time.monotonic() < deadline
        assert reader.read(span.offset, (64, 6)).tolist() == numbers.tolist()


@pytest.mark.gpu
def test_a_device_writes_drafts_when_its_stream_comes_to_it():
    device = torch.device("cuda", 0)
    writer, reader = pair(board_bytes(64, 4), device)
    zeros = torch.zeros(64, 6, dtype=torch.int32, device=device)
    # A kernel that is used for the first time is loaded then, which can wait for the device.
    torch.zeros(64, 8, dtype=torch.int32, device=device)[:, :4].contiguous()
    for _ in range(20):
        span = writer.post(zeros)
        made = torch.randint(-9, 9, (64, 8), dtype=torch.int32, device=device)
        torch.cuda._sleep(50_000_000)  # clock cycles, some 25 ms
        reader.answer(span.generation, span.offset, made[:, :4])
        assert not writer.has_drafts(span)
        deadline = time.monotonic() + 5
        while not writer.has_drafts(span):
            assert time.monotonic() < deadline
        assert writer.drafts(span, (64, 4)).tolist() == made[:, :4].tolist()


@pytest.mark.gpu
def test_memory_that_a_device_cannot_write_is_refused():
    device, segment = torch.device("cuda", 0), HostSegment.unshared(board_bytes(1, 4), CPU)
    with pytest.raises(SegmentError, match="not pinned"):
        VerifierBoard(segment, device)
    DrafterBoard(segment, device).answer(1, 128, torch.ones(1, 4, dtype=torch.int32, device=device))
    torch.cuda.synchronize()
    assert not segment.memory.any()
