"""When a waiting thread goes through what it is about to do."""

from __future__ import annotations

import math
import os
import queue
import threading
import time

import pytest

from draftwire.mailbox import Mailbox
from draftwire.practice import BEFORE_S, Practice


class Counted:
    """A rehearsal that counts how often it was gone through, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.prepared = self.count = 0
        self._fails = fails

    def prepare(self) -> None:
        self.prepared += 1

    def run(self) -> list[float]:
        self.count += 1
        if self._fails:
            raise RuntimeError("not today")
        return []


def test_it_is_due_before_the_next_of_even_events_and_once():
    rehearsal = Counted()
    practice = Practice(rehearsal, longest_s=0.02)
    assert practice.due == math.inf
    practice.note(1.0)
    assert practice.due == math.inf
    practice.note(1.006)
    assert practice.due == pytest.approx(1.012 - BEFORE_S)
    times = [practice.due + share * BEFORE_S for share in (-0.1, 0.0, 0.2, 0.3)]
    assert [practice.is_due(now) for now in times] == [False, True, True, False]
    practice.go()
    assert (rehearsal.prepared, rehearsal.count, practice.due) == (1, 1, math.inf)
    practice.note(1.012)
    assert practice.due == pytest.approx(1.018 - BEFORE_S)


@pytest.mark.parametrize("period", [0.0, BEFORE_S / 2, 0.021, 5.0])
def test_nothing_is_expected_at_once_or_after_long(period):
    practice = Practice(Counted(), longest_s=0.02)
    practice.note(1.0)
    practice.note(1.0 + period)
    assert practice.due == math.inf


def test_nothing_is_due_without_a_rehearsal_and_after_one_that_failed(caplog):
    failing = Counted(fails=True)
    for practice in (Practice(None, longest_s=0.02), Practice(failing, longest_s=0.02)):
        practice.note(1.0)
        practice.note(1.006)
        practice.go()
        practice.note(1.012)
        practice.note(1.018)
        assert practice.due == math.inf
    assert failing.count == 1
    assert "not today" in caplog.text


def test_the_owner_of_a_mailbox_practises_while_it_waits_and_no_message_is_lost():
    rehearsal = Counted()
    mailbox: Mailbox[int] = Mailbox(awake_s=1.0, rehearsal=rehearsal)
    read_end, write_end = os.pipe()
    mailbox.watch(read_end, lambda: list(os.read(read_end, 100)))

    def send() -> None:
        for number in range(20):
            time.sleep(0.05)
            os.write(write_end, bytes([number]))

    sender = threading.Thread(target=send)
    sender.start()
    assert [mailbox.get(timeout=30.0) for _ in range(20)] == list(range(20))
    sender.join()
    assert 1 <= rehearsal.count <= 20
    before = rehearsal.count
    with pytest.raises(queue.Empty):
        mailbox.get_nowait()
    assert rehearsal.count == before
    os.close(read_end)
    os.close(write_end)
