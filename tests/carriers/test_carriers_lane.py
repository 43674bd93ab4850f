"""Messages between two engines: whole and in order, bounded, and gone with their peer."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time

import pytest

from draftwire.carriers import Lane, lane
from draftwire.carriers.lane import MAX_MESSAGE_BYTES, MAX_MESSAGES
from draftwire.mailbox import Mailbox

WAIT_S = 30.0
LARGEST = bytes(MAX_MESSAGE_BYTES)


@pytest.fixture
def ends():
    here, there = (Lane(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    messages = [b"a", LARGEST, b"c" * 1000]
    received = []
    for message in messages:
        assert here.send(message)
        received += there.receive()
    assert received == messages
    assert there.receive() == []
    assert there.send(b"back")
    assert here.receive() == [b"back"]


def test_a_message_has_the_time_at_which_it_came_however_late_it_is_read(ends):
    here, there = ends
    assert there.receive_timed() == []
    begin = time.monotonic()
    assert here.send(b"x")
    end = time.monotonic()
    time.sleep(0.6)
    ((message, came),) = there.receive_timed()
    assert message == b"x"
    assert begin - 0.3 <= came <= end + 0.3


def test_a_clock_that_is_set_puts_no_message_before_the_last_look_or_into_the_future(ends, monkeypatch):
    here, there = ends
    looked, real = time.monotonic(), time.time
    assert there.receive_timed() == []
    for shift in (3600.0, -3600.0):
        assert here.send(b"x")
        monkeypatch.setattr(time, "time", lambda shift=shift: real() + shift)
        ((_, came),) = there.receive_timed()
        assert looked <= came <= time.monotonic()


@pytest.mark.parametrize("has_times", [True, False], ids=["times", "no-times"])
def test_open_files_that_a_peer_sends_along_are_not_taken(monkeypatch, has_times):
    if not has_times:
        monkeypatch.setattr(lane, "_TIMESTAMPS", 9999)  # an option that no kernel has
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = Lane(ours)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        socket.send_fds(theirs, [b"x"], [theirs.fileno()])
    assert end.receive() == [b"x"] * 3
    assert os.listdir("/proc/self/fd") == before
    end.close()
    theirs.close()


def test_a_message_that_is_too_large_is_not_sent(ends):
    here, there = ends
    assert not here.send(LARGEST + b"x")
    assert there.receive() == []


def test_a_peer_that_does_not_read_makes_nobody_wait_and_loses_nothing(ends):
    here, there = ends
    count = 0
    while here.send(b"%d" % count + bytes(3000)):
        count += 1
    assert count > 10
    received = []
    while messages := there.receive():
        received += messages
    assert [int(message.rstrip(b"\0")) for message in received] == list(range(count))
    assert here.send(b"again")


def test_messages_are_taken_some_at_a_time(ends):
    here, there = ends
    for _ in range(MAX_MESSAGES + 1):
        assert here.send(b"x")
    assert [len(there.receive()) for _ in range(3)] == [MAX_MESSAGES, 1, 0]


def test_what_a_peer_sent_before_it_went_is_received(ends):
    here, there = ends
    here.send(b"last")
    here.close()
    assert there.receive() == [b"last"]
    with pytest.raises(ConnectionError, match="the peer is gone"):
        there.receive()
    assert not there.send(b"x")


def test_a_peer_that_sends_more_than_fits_a_message_is_cut_off():
    peer, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with peer:
        lane = Lane(ours)
        peer.send(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionError, match="too large"):
            lane.receive()
        lane.close()


# The mailbox of a thread that waits for both.


def test_items_come_in_order_and_empty_is_told():
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


def test_what_was_found_and_not_taken_yet_is_known_without_another_look():
    box: Mailbox[int] = Mailbox()
    for item in (1, 2):
        box.put(item)
    assert not box.has_more  # it has not looked
    assert box.get() == 1
    assert box.has_more
    assert box.get() == 2
    box.put(3)
    assert not box.has_more
    assert box.get() == 3


def test_the_owner_is_woken_by_an_item_and_by_a_message(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), there.receive)
    for wake in (lambda: box.put(b"item"), lambda: here.send(b"message")):
        timer = threading.Timer(0.05, wake)
        timer.start()
        assert box.get(10) in (b"item", b"message")
        timer.join()


def test_a_message_that_was_sent_before_an_item_was_put_comes_before_it(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(there.fileno(), there.receive)
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
    box.watch(there.fileno(), there.receive)
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


def test_a_reader_that_has_ended_or_is_not_watched_any_more_is_not_read(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    reads = []

    def end() -> None:
        reads.append(there.receive())

    box.watch(there.fileno(), end)
    here.send(b"x")
    for _ in range(2):
        with pytest.raises(queue.Empty):
            box.get_nowait()
    assert reads == [[b"x"]]
    box.watch(there.fileno(), there.receive)
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
def test_an_owner_that_stays_awake_gets_what_one_that_sleeps_gets(ends, awake_s):
    here, there = ends
    box: Mailbox[bytes] = Mailbox(awake_s)
    box.watch(here.fileno(), here.receive)
    for number in range(3):
        threading.Timer(0.01, box.put, [b"put"]).start()
        assert box.get(WAIT_S) == b"put"
        threading.Timer(0.01, there.send, [b"%d" % number]).start()
        assert box.get(WAIT_S) == b"%d" % number
        with pytest.raises(queue.Empty):
            box.get(0.01)


def test_a_short_wait_ends_with_what_comes_first_and_takes_nothing(ends):
    here, there = ends
    box: Mailbox[bytes] = Mailbox()
    box.watch(here.fileno(), here.receive)
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
