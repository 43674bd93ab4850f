"""The order of polled items and messages in a mailbox."""

from __future__ import annotations

import os
import threading

from draftwire.transport.mailbox import Mailbox


def test_what_is_seen_comes_behind_messages_that_are_there():
    seen: list[int] = []
    mailbox: Mailbox[int] = Mailbox(awake_s=30.0, poll=lambda: seen.pop() if seen else None)
    read_end, write_end = os.pipe()
    mailbox.watch(read_end, lambda: list(os.read(read_end, 1)))
    seen.append(7)
    os.write(write_end, bytes([1]))
    assert mailbox.get(timeout=30.0) == 1
    assert mailbox.get_nowait() == 7
    threading.Timer(0.05, lambda: seen.append(8)).start()
    os.write(write_end, bytes([2]))
    assert [mailbox.get(timeout=30.0), mailbox.get(timeout=30.0)] == [2, 8]  # nothing wakes the owner for 8: it polls
    os.close(read_end)


def test_a_mailbox_leaves_no_descriptors():
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    mailboxes: list[Mailbox[int]] = [Mailbox() for _ in range(20)]
    before = count()
    del mailboxes
    assert count() < before - 30  # two for each mailbox; other threads may open some
