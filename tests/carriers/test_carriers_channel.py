"""The message channel between two engines: order, size limits, and peers that end or break the rules."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
import time
from multiprocessing import get_context
from typing import Any

import pytest
from rings import CPU, channel_ends, ends_of

from draftwire.transport import Channel, SegmentError, ring_bytes
from draftwire.transport.channel import drafter_channel, verifier_channel
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.mailbox import Mailbox
from draftwire.transport.ring import MAX_MESSAGE_BYTES

WAIT_S = 30.0
LARGEST = bytes(MAX_MESSAGE_BYTES)


@pytest.fixture
def ends():
    here, there = channel_ends()
    yield here, there
    here.close()
    there.close()


def messages_of(end: Channel) -> list[bytes]:
    return [record.message for record in end.receive()]


def messages_until_gone(end: Channel) -> list[bytes] | None:
    """Return the messages as the engine reads them, or None if the peer has ended."""
    try:
        return messages_of(end)
    except ConnectionError:
        return None


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    messages = [b"a", LARGEST, b"c" * 1000, b""]
    received = []
    for message in messages:
        assert here.send(message)
        received += messages_of(there)
    assert received == messages
    assert there.receive() == []
    assert there.send(b"back")
    assert messages_of(here) == [b"back"]


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_any_size_go_around_the_ring(ends, seed):
    here, there = ends
    draw = random.Random(seed)
    sent: list[bytes] = []
    received: list[bytes] = []
    for _ in range(600):
        message = draw.randbytes(draw.choice((0, 1, 63, 64, 65, 4000, draw.randrange(MAX_MESSAGE_BYTES))))
        if here.send(message):
            sent.append(message)
        else:
            received += messages_of(there)
        if draw.random() < 0.3:
            received += messages_of(there)
    received += messages_of(there)
    assert len(sent) > 400
    assert received == sent


def test_the_largest_message_fits_wherever_the_ring_is(ends):
    here, there = ends
    for _ in range(5):
        for count in range(1, 40):
            assert here.send(bytes(64 * count))
            assert len(there.receive()) == 1
        assert here.send(LARGEST)
        assert messages_of(there) == [LARGEST]


def test_a_message_has_the_time_at_which_it_was_written(ends):
    here, there = ends
    assert there.receive() == []
    begin = time.monotonic()
    assert here.send(b"x")
    end = time.monotonic()
    time.sleep(0.2)
    (record,) = there.receive()
    assert begin <= record.written <= end


@pytest.mark.parametrize("value", [0, 2**63, 2**64 - 1])
def test_a_time_that_lies_is_between_the_last_look_and_now(value):
    rings = HostSegment.unshared(ring_bytes(1, 1), CPU)
    here, there = ends_of(rings)
    looked = time.monotonic()
    assert there.receive() == []
    assert here.send(b"x")
    rings.memory.numpy()[128:].view("uint64")[2] = value
    (record,) = there.receive()
    assert looked <= record.written <= time.monotonic()


def test_open_files_that_a_peer_sends_along_are_not_taken():
    rings = HostSegment.unshared(ring_bytes(1, 1), CPU)
    here, there = ends_of(rings)
    before = os.listdir("/proc/self/fd")
    peer = socket.socket(fileno=os.dup(here.fileno()))
    for _ in range(3):
        socket.send_fds(peer, [b"x"], [peer.fileno()])
    peer.close()
    assert there.receive() == []
    assert os.listdir("/proc/self/fd") == before


def test_a_message_that_is_too_large_is_not_sent(ends):
    here, there = ends
    assert not here.send(LARGEST + b"x")
    assert there.receive() == []


def test_a_peer_that_does_not_read_loses_nothing(ends):
    """`send` returns false when the ring is full; it does not block."""
    here, there = ends
    count = 0
    while here.send(b"%d" % count + bytes(3000)):
        count += 1
    assert count > 10
    received = []
    while messages := messages_of(there):
        received += messages
    assert [int(message.rstrip(b"\0")) for message in received] == list(range(count))
    assert here.send(b"again")


def test_many_small_messages_wake_a_reader_until_all_are_read(ends):
    """There are more messages than the socket has room for wake-up bytes."""
    here, there = ends
    count = 0
    while here.send(b"%d" % count):
        count += 1
    assert count > 1000
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), lambda: messages_of(there))
    assert [box.get_nowait() for _ in range(count)] == [b"%d" % number for number in range(count)]


def test_what_a_peer_sent_before_it_went_is_received(ends):
    here, there = ends
    here.send(b"last")
    here.close()
    assert messages_of(there) == [b"last"]
    with pytest.raises(ConnectionError, match="the peer is gone"):
        there.receive()
    assert not there.send(b"x")


def echo(connection: socket.socket, rings: HostSegment, count: int) -> None:
    """Send every message back, as the drafter's end in a separate process."""
    end = drafter_channel(connection, rings, CPU)
    box: Mailbox[bytes] = Mailbox()
    box.watch(end.fileno(), lambda: messages_of(end))
    for _ in range(count):
        message = box.get(WAIT_S)
        while not end.send(message):
            time.sleep(0.001)


def test_two_processes_exchange_what_was_sent():
    """Messages are intact although CPUs may reorder memory accesses."""
    count = 3000
    rings = HostSegment.unshared(ring_bytes(1, 1), CPU)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = get_context("fork").Process(target=echo, args=(theirs, rings, count), daemon=True)
    process.start()
    theirs.close()
    end = verifier_channel(ours, rings, CPU)
    box: Mailbox[bytes] = Mailbox()
    box.watch(end.fileno(), lambda: messages_until_gone(end))
    draw = random.Random(3)
    sent: list[bytes] = []
    received: list[bytes] = []
    while len(sent) < count:
        message = draw.randbytes(draw.randrange(2000))
        if end.send(message):
            sent.append(message)
        while box.wait(0.0):
            received.append(box.get_nowait())
    while len(received) < count:
        received.append(box.get(WAIT_S))
    assert received == sent
    process.join(WAIT_S)
    end.close()


# Peers that write invalid data.


def hostile() -> tuple[Any, Any, Channel, Channel]:
    """Return the memory of the ring to the drafter, from its first record and from its `read` on, and both ends."""
    rings = HostSegment.unshared(ring_bytes(1, 1), CPU)
    memory = rings.memory.numpy()
    return memory[128:].view("uint32"), memory[64:].view("uint64"), *ends_of(rings)


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (MAX_MESSAGE_BYTES + 1, 0),
        (2**32 - 2, 0),
        (2**31, 2**31),
        (8, 2**32 - 4),
        (8, 2**32 - 1),
        (8, 5),
        (0, 1 << 20),
    ],
)
def test_a_header_that_lies_ends_the_channel(length, body):
    words, _, here, there = hostile()
    assert here.send(b"12345678")
    words[1], words[2] = length, body
    with pytest.raises(ConnectionError, match="does not fit"):
        there.receive()


def test_skips_without_end_end_the_look():
    words, _, _, there = hostile()
    words[0::16] = range(1, len(words[0::16]) + 1)
    words[1::16] = 2**32 - 1
    assert there.receive() == []


@pytest.mark.parametrize("value", [2**64 - 1, 64 * 9, 63])
def test_a_peer_that_says_it_has_read_what_was_not_sent(value):
    _, reads, here, there = hostile()
    assert here.send(b"12345678")
    assert len(there.receive()) == 1
    assert here.send(b"12345678")  # `here` now knows that `read` is 128
    reads[0] = value
    assert not here.send(b"x")


def test_memory_for_no_ring_is_refused():
    for size in (128, 200, 64 * 6):
        with pytest.raises(SegmentError, match="no room for two rings"):
            ends_of(HostSegment.unshared(size, CPU))


def test_noise_in_the_memory_is_read_or_ends_the_channel():
    draw = random.Random(5)
    ended = 0
    for _ in range(300):
        rings = HostSegment.unshared(ring_bytes(1, 1), CPU)
        here, there = ends_of(rings)
        memory = rings.memory.numpy()
        for _ in range(draw.randrange(1, 4)):
            here.send(draw.randbytes(draw.randrange(300)))
            at = 64 + draw.randrange(600)
            noise = draw.randbytes(draw.choice((1, 4, 8, 64)))
            memory[at : at + len(noise)] = list(noise)
            try:
                for record in there.receive():
                    if record.body is not None:
                        record.body.read((1, record.body.num_numbers))
                        record.body.release()
            except ConnectionError:
                ended += 1
                break
        here.close()
        there.close()
    assert 0 < ended < 300


# The mailbox of a thread that waits for items and messages.


def test_items_come_in_order_and_empty_is_reported():
    box: Mailbox[int] = Mailbox()
    with pytest.raises(queue.Empty):
        box.get_nowait()
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        box.get(0.05)
    assert time.monotonic() - began >= 0.05
    for i in range(3):
        box.put(i)
    assert [box.get(), box.get_nowait(), box.get(5)] == [0, 1, 2]


def test_a_result_found_but_not_taken_is_known_without_a_look():
    box: Mailbox[int] = Mailbox()
    for item in (1, 2):
        box.put(item)
    assert not box.has_more  # the mailbox has not looked yet
    assert box.get() == 1
    assert box.has_more
    assert box.get() == 2
    box.put(3)
    assert not box.has_more
    assert box.get() == 3


def test_the_owner_is_woken_by_an_item_and_by_a_message(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), lambda: messages_of(there))
    for wake in (lambda: box.put(b"item"), lambda: here.send(b"message")):
        timer = threading.Timer(0.05, wake)
        timer.start()
        assert box.get(10) in (b"item", b"message")
        timer.join()


def test_an_earlier_message_comes_before_a_later_item(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), lambda: messages_of(there))
    box.put(b"1")
    here.send(b"2")
    box.put(b"3")
    here.send(b"4")
    box.put(b"5")
    order = [box.get_nowait() for _ in range(5)]
    assert order.index(b"2") < order.index(b"3")
    assert order.index(b"4") < order.index(b"5")
    assert sorted(order) == [b"1", b"2", b"3", b"4", b"5"]


def test_nothing_is_lost_and_the_order_holds_while_others_send(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), lambda: messages_of(there))
    count = 3000

    def send() -> None:
        for i in range(count):
            while not here.send(b"m%d" % i):
                time.sleep(0.001)
            box.put(b"i%d" % i)

    sender = threading.Thread(target=send)
    sender.start()
    received = [box.get(10) for _ in range(2 * count)]
    sender.join()
    place = {message: i for i, message in enumerate(received)}
    assert len(place) == 2 * count
    assert all(place[b"m%d" % i] < place[b"i%d" % i] for i in range(count))
    for kind in (b"m", b"i"):
        places = [place[kind + b"%d" % i] for i in range(count)]
        assert places == sorted(places)


def test_a_reader_that_ended_or_is_not_watched_is_not_read(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    reads = []

    def end() -> None:
        reads.append(messages_of(there))

    box.watch(there.fileno(), end)
    here.send(b"x")
    for _ in range(2):
        with pytest.raises(queue.Empty):
            box.get_nowait()
    assert reads == [[b"x"]]
    box.watch(there.fileno(), lambda: messages_of(there))
    box.unwatch(there.fileno())
    here.send(b"y")
    with pytest.raises(queue.Empty):
        box.get_nowait()


def test_what_is_left_can_be_taken_by_another_thread():
    box: Mailbox[int | None] = Mailbox()
    for i in (1, None, 3):
        box.put(i)
    assert box.get() == 1
    left: list[int | None] = []
    thread = threading.Thread(target=lambda: left.extend(box.leftovers()))
    thread.start()
    thread.join()
    assert left == [None, 3]


@pytest.mark.parametrize("awake_s", [0.0, 30.0])
def test_an_owner_awake_gets_what_an_owner_asleep_gets(ends, awake_s):
    here, there = ends
    box: Mailbox[bytes] = Mailbox(awake_s)
    box.watch(here.fileno(), lambda: messages_of(here))
    for number in range(3):
        threading.Timer(0.01, box.put, [b"put"]).start()
        assert box.get(WAIT_S) == b"put"
        threading.Timer(0.01, there.send, [b"%d" % number]).start()
        assert box.get(WAIT_S) == b"%d" % number
        with pytest.raises(queue.Empty):
            box.get(0.01)


def test_a_short_wait_ends_with_an_event_and_takes_nothing(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(here.fileno(), lambda: messages_of(here))
    began = time.monotonic()
    assert not box.wait(0.0001)
    assert not box.wait(0)
    assert there.send(b"sent")
    assert box.wait(WAIT_S)
    assert box.wait(0)
    assert box.get_nowait() == b"sent"
    box.put(b"put")
    assert box.wait(WAIT_S)
    assert box.get_nowait() == b"put"
    assert not box.wait(0)
    threading.Timer(0.01, box.put, [b"late"]).start()
    assert box.wait(WAIT_S)
    assert time.monotonic() - began < WAIT_S
    assert box.get_nowait() == b"late"
