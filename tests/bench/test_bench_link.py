"""The link to a network namespace: it is never faster than its settings, and it loses packets as set."""

from __future__ import annotations

import socket

import pytest

from draftwire_bench.link import MEASURED_BYTES, Link, LinkQuality


@pytest.mark.parametrize(("delay_s", "bytes_per_s"), [(0.02, None), (0.0, 20e6), (0.01, 50e6)])
def test_a_link_is_not_faster_than_it_is_set(link: Link, delay_s: float, bytes_per_s: float | None) -> None:
    link.set(LinkQuality(delay_s, bytes_per_s))
    reached = link.measure()
    assert reached.round_trip_s >= 2 * delay_s
    if bytes_per_s is not None:
        seconds = MEASURED_BYTES / reached.bytes_per_s + reached.round_trip_s
        assert seconds >= MEASURED_BYTES / bytes_per_s + 2 * delay_s


def test_nothing_arrives_where_all_packets_are_lost(link: Link) -> None:
    before = link.set(LinkQuality(loss=1.0))
    with pytest.raises(TimeoutError), socket.create_connection((link.address, 9), timeout=1.5):
        pass
    assert link.set(LinkQuality()) > before
    # Nobody listens there, so the refusal arrives at once.
    with pytest.raises(ConnectionRefusedError), socket.create_connection((link.address, 9), timeout=30):
        pass
