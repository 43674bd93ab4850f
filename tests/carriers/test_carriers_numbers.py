"""Numbers that a device writes behind a message; the other side sees them without another message."""

from __future__ import annotations

import gc
import os
import socket
import time
import weakref

import pytest
import torch
from rings import CPU, HeldMarks, channel_ends, ends_of

from draftwire.transport import Body, Channel, SegmentError, ring_bytes
from draftwire.transport.channel import drafter_channel, verifier_channel
from draftwire.transport.host_segment import HostSegment

TIMES = 200  # more than a ring has room for


def sent(here: Channel, there: Channel, numbers: torch.Tensor, message: bytes = b"x") -> Body:
    """Send a message with numbers; return the received body."""
    assert here.send(message, numbers)
    (record,) = there.receive()
    assert record.message == message
    assert record.body is not None
    assert record.body.num_numbers == numbers.numel()
    return record.body


@pytest.mark.parametrize("way", [0, 1], ids=["to the drafter", "to the verifier"])
def test_numbers_are_read_as_they_were_written(way):
    ends = channel_ends(size=ring_bytes(3, 4))
    here, there = ends[way], ends[1 - way]
    for turn in range(TIMES):
        numbers = torch.arange(18, dtype=torch.int32).view(3, 6) - turn
        body = sent(here, there, numbers, b"x" * turn)
        assert body.is_written
        assert body.read((3, 6)).tolist() == numbers.tolist()
        assert body.read((2, 4)).flatten().tolist() == numbers.flatten()[:8].tolist()
        body.release()


def test_a_message_comes_before_its_numbers():
    rings = HostSegment.unshared(ring_bytes(2, 2), CPU)
    marks = HeldMarks(rings)
    here, there = ends_of(rings, write_value=marks)
    bodies = [sent(here, there, torch.full((2, 4), turn, dtype=torch.int32)) for turn in range(3)]
    assert [body.is_written for body in bodies] == [False] * 3
    marks.write(1)
    assert [body.is_written for body in bodies] == [False, True, False]
    assert here.send(b"later")
    assert [record.message for record in there.receive()] == [b"later"]
    marks.write(0)
    assert bodies[0].is_written
    assert bodies[0].read((2, 4)).tolist() == [[0] * 4] * 2


def test_the_mark_comes_behind_the_numbers():
    rings = HostSegment.unshared(ring_bytes(2, 2), CPU)
    words = rings.memory.numpy().view("int32")
    numbers = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    seen = []

    def note(_stream: int, address: int, value: int) -> None:
        first = (address - rings.memory.data_ptr()) // 4 + 16
        seen.append((value, words[first : first + 8].tolist()))

    here, _ = ends_of(rings, write_value=note)
    assert here.send(b"x", numbers)
    assert seen == [(1, numbers.flatten().tolist())]


def test_room_of_numbers_is_kept_until_they_are_released():
    """Unreleased numbers are not overwritten, and the room of later messages is not reused before their release."""
    here, there = channel_ends(size=ring_bytes(2, 2))
    numbers = torch.arange(8, dtype=torch.int32).view(2, 4)
    body = sent(here, there, numbers)
    count = 0
    while here.send(bytes(3000)):
        there.receive()
        count += 1
    assert count > 10
    assert body.read((2, 4)).tolist() == numbers.tolist()
    body.release()
    body.release()
    assert here.send(bytes(3000))


def test_numbers_may_be_released_in_any_order():
    here, there = channel_ends(size=ring_bytes(2, 2))
    for _ in range(TIMES):
        bodies = [sent(here, there, torch.zeros(2, 4, dtype=torch.int32)) for _ in range(3)]
        for number in (1, 0, 2):
            bodies[number].release()


def test_old_numbers_do_not_pass_for_new_ones():
    """The place of a mark holds numbers of an earlier record, which can equal the next mark."""
    rings = HostSegment.unshared(ring_bytes(2, 2), CPU)
    marks = HeldMarks(rings)
    here, there = ends_of(rings, write_value=marks)
    for number in range(1, TIMES):
        body = sent(here, there, torch.full((2 + number % 7, 40), number + number % 5, dtype=torch.int32))
        assert not body.is_written
        marks.write()
        assert body.is_written
        body.release()


def test_a_device_that_cannot_write_sends_no_more_numbers(caplog):
    calls = []

    def fail(*call: int) -> None:
        calls.append(call)
        raise SegmentError("not here")

    here, there = channel_ends(write_value=fail)
    assert here.takes_numbers
    assert not here.send(b"x", torch.ones(1, 4, dtype=torch.int32))
    assert not here.takes_numbers
    assert len(calls) == 1
    assert "does not write into shared memory: not here" in caplog.text
    assert here.send(b"y")
    assert [record.message for record in there.receive()] == [b"y"]


def test_no_end_keeps_its_memory():
    """Shared memory must be freed immediately, and Python's collection of reference cycles may run much later."""
    rings = HostSegment.unshared(ring_bytes(3, 4), CPU)
    here, there = ends_of(rings)
    body = sent(here, there, torch.zeros(3, 6, dtype=torch.int32))
    segment = weakref.ref(rings)
    gc.collect()
    gc.disable()
    try:
        del here, there, rings, body
        assert segment() is None
    finally:
        gc.enable()


def test_more_numbers_than_the_ring_has_room_for_are_not_sent():
    here, there = channel_ends(size=ring_bytes(3, 4))
    assert not here.send(b"x", torch.zeros(1 << 20, 6, dtype=torch.int32))
    assert here.send(b"y")
    assert len(there.receive()) == 1


def devices_ends(device: torch.device) -> tuple[Channel, Channel]:
    """Return both ends, each with a separate mapping of the memory."""
    size = ring_bytes(64, 4)
    owned, fds = HostSegment.create(size, device)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        attached = HostSegment.attach(fds, size, device)
    finally:
        for fd in fds:
            os.close(fd)
    return verifier_channel(ours, attached, device), drafter_channel(theirs, owned, device)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [0, 1], ids=["to the drafter", "to the verifier"])
def test_a_device_writes_when_its_stream_comes_to_it(way):
    device = torch.device("cuda", 0)
    ends = devices_ends(device)
    here, there = ends[way], ends[1 - way]
    # The first use of a kernel loads it, which can wait for the device.
    torch.zeros(64, 8, dtype=torch.int32, device=device)[:, :6].contiguous()
    for _ in range(TIMES // 4):
        numbers = torch.randint(-9, 9, (64, 8), dtype=torch.int32, device=device)[:, :6]
        torch.cuda._sleep(50_000_000)  # clock cycles, about 25 ms
        body = sent(here, there, numbers)
        assert not body.is_written
        deadline = time.monotonic() + 5
        while not body.is_written:
            assert time.monotonic() < deadline
        assert body.read((64, 6)).tolist() == numbers.tolist()
        body.release()


@pytest.mark.gpu
def test_memory_that_a_device_cannot_write_takes_no_numbers(caplog):
    device, rings = torch.device("cuda", 0), HostSegment.unshared(ring_bytes(1, 4), CPU)
    here, there = ends_of(rings, device)
    assert not here.send(b"x", torch.ones(1, 4, dtype=torch.int32, device=device))
    torch.cuda.synchronize()
    assert "not pinned" in caplog.text
    assert not here.takes_numbers
    assert there.receive() == []
