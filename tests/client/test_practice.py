"""When a waiting thread goes through what it is about to do."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from draftwire import practice as practice_module
from draftwire.mailbox import Mailbox
from draftwire.practice import BEFORE_S, QUIET_S, Practice, rehearse_with


class Counted:
    """A rehearsal of three pieces that counts how often it was gone through, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.prepared = self.count = self.pieces = 0
        self._fails = fails

    def prepare(self) -> None:
        self.prepared += 1

    def run(self) -> Iterator[float | None]:
        for mark in (1.0, None, 2.0):
            self.pieces += 1
            yield mark
        self.count += 1
        if self._fails:
            raise RuntimeError("not today")


def noted(rehearsal: Counted | None, *times: float, begun: float = 0.0) -> Practice:
    """A practice of what took these times, and has begun again."""
    practice = Practice(rehearsal, longest_s=0.02)
    for took in times:
        practice.begin(1.0)
        practice.end(1.0 + took)
    practice.begin(begun)
    return practice


def test_it_is_due_before_the_end_of_what_has_taken_as_long_twice_and_not_when_that_may_come():
    rehearsal = Counted()
    assert noted(rehearsal).due == noted(rehearsal, 0.006).due == math.inf
    practice = noted(rehearsal, 0.0055, 0.006, begun=2.0)
    assert practice.due == pytest.approx(2.006 - BEFORE_S)
    whole = BEFORE_S - QUIET_S
    times = [practice.due + share * whole for share in (-0.1, 0.0, 0.5, 0.99, 1.01)]
    assert [practice.is_due(now) for now in times] == [False, True, True, True, False]
    practice.end(2.0062)
    assert practice.due == math.inf
    practice.begin(3.0)
    assert practice.due == pytest.approx(3.0062 - BEFORE_S)


def test_nothing_is_expected_of_what_has_ended_without_a_begin():
    practice = noted(Counted(), 0.006, 0.006)
    practice.end(5.0)
    practice.end(5.006)
    practice.begin(6.0)
    assert practice.due == math.inf


def test_it_goes_on_piece_by_piece_and_begins_again():
    rehearsal = Counted()
    practice = noted(rehearsal, 0.006, 0.006)
    found = []
    for _ in range(9):
        practice.go_on()
        found.append((rehearsal.prepared, rehearsal.pieces, rehearsal.count))
    # Made ready, three pieces, what is behind the last of them; an event between two pieces changes nothing.
    assert found == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0), (2, 3, 1), (2, 4, 1), (2, 5, 1), (2, 6, 1), (3, 6, 2)]
    assert practice.is_due(practice.due)


def test_no_piece_is_begun_that_would_not_have_ended_when_it_comes(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    class Slow(Counted):
        def run(self) -> Iterator[float | None]:
            clock.now += 0.3e-3
            yield None

    clock = Clock()
    monkeypatch.setattr(practice_module, "time", clock)
    practice = noted(Slow(), 0.006, 0.006)
    last = practice.due + BEFORE_S - QUIET_S
    practice.go_on()  # makes ready, which takes no time
    assert practice.is_due(last - 0.1e-3)
    practice.go_on()
    assert [practice.is_due(last - left) for left in (0.1e-3, 0.29e-3, 0.31e-3)] == [False, False, True]
    for _ in range(30):  # what took long once does not count for ever
        practice._pieces = iter([None])
        practice.go_on()
    assert practice.is_due(last - 0.1e-3)


@pytest.mark.parametrize("times", [(0.021, 0.021), (5.0, 5.0), (0.003, 0.015), (0.015, 0.003), (0.006, 0.0069)])
def test_nothing_is_expected_after_long_or_of_what_took_different_times(times):
    assert noted(Counted(), *times).due == math.inf


def test_nothing_is_due_without_a_rehearsal_and_after_one_that_failed(caplog):
    failing = Counted(fails=True)
    for practice in (noted(None, 0.006, 0.006), noted(failing, 0.006, 0.006)):
        for _ in range(6):
            practice.go_on()
        for now in (1.0, 2.0, 3.0):
            practice.begin(now)
            practice.end(now + 0.006)
        practice.begin(4.0)
        assert practice.due == math.inf
    assert failing.count == 1
    assert "not today" in caplog.text


def test_a_rehearsal_is_gone_through_when_it_is_made_and_none_where_that_fails(caplog):
    made = rehearse_with(Counted)
    assert isinstance(made, Counted)
    assert (made.prepared, made.count) == (1, 1)
    assert rehearse_with(lambda: Counted(fails=True)) is None

    def make() -> Counted:
        raise OSError("no shared memory")

    assert rehearse_with(make) is None
    assert "no shared memory" in caplog.text


def test_the_owner_of_a_mailbox_practises_while_it_waits_and_no_message_is_lost(monkeypatch):
    """Whenever something is expected: whether messages come evenly here is the machine's affair."""
    monkeypatch.setattr(Practice, "begin", lambda self, now: setattr(self, "due", now))
    rehearsal = Counted()
    mailbox: Mailbox[int] = Mailbox(awake_s=30.0, rehearsal=rehearsal)
    monkeypatch.setattr(Practice, "is_due", lambda self, _now: self.due < math.inf)
    read_end, write_end = os.pipe()
    mailbox.watch(read_end, lambda: list(os.read(read_end, 1)))

    def send() -> None:
        for number in range(20):
            time.sleep(0.02)
            os.write(write_end, bytes([number]))

    sender = threading.Thread(target=send)
    sender.start()
    found = []
    for _ in range(20):
        mailbox.expect()
        found.append(mailbox.get(timeout=30.0))
    assert found == list(range(20))
    sender.join()
    before = rehearsal.prepared
    assert before >= 20
    with pytest.raises(queue.Empty):
        mailbox.get_nowait()
    assert rehearsal.prepared == before
    os.close(read_end)
    os.close(write_end)


def test_what_the_owner_sees_counts_as_a_message_and_comes_behind_those_that_are_there():
    seen: list[int] = []
    mailbox: Mailbox[int] = Mailbox(awake_s=30.0, look=lambda: seen.pop() if seen else None)
    read_end, write_end = os.pipe()
    mailbox.watch(read_end, lambda: list(os.read(read_end, 1)))
    seen.append(7)
    os.write(write_end, bytes([1]))
    assert mailbox.get(timeout=30.0) == 1
    assert mailbox.get_nowait() == 7
    threading.Timer(0.05, lambda: seen.append(8)).start()
    os.write(write_end, bytes([2]))
    assert [mailbox.get(timeout=30.0), mailbox.get(timeout=30.0)] == [2, 8]  # nothing wakes it for that: it looks
    os.close(read_end)
