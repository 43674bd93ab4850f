"""When a client that found the queue full should come again."""

from __future__ import annotations

import pytest
from drafting_scene import Clock

from verifier_service.core import retry_hint
from verifier_service.core.retry_hint import RETRY_S, WINDOW_S, RetryAfterEstimator


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retry_hint, "time", made)
    monkeypatch.setattr(retry_hint.random, "uniform", lambda low, high: (low + high) / 2)
    return made


def test_it_is_when_half_of_the_queue_has_moved_on(clock):
    pace = RetryAfterEstimator(64)
    for _ in range(40):
        clock.now += WINDOW_S / 40
        pace.count_end()
    assert pace.retry_after_s() == pytest.approx(32 * WINDOW_S / 40)


def test_what_ended_long_ago_does_not_count(clock):
    pace = RetryAfterEstimator(2)
    for _ in range(100):
        pace.count_end()
    clock.now += WINDOW_S + 1
    pace.count_end()
    assert pace.retry_after_s() == WINDOW_S


@pytest.mark.parametrize(("num_ends", "seconds"), [(0, RETRY_S[1]), (100_000, RETRY_S[0])])
def test_it_stays_within_bounds(clock, num_ends, seconds):  # noqa: ARG001
    pace = RetryAfterEstimator(64)
    for _ in range(num_ends):
        pace.count_end()
    assert pace.retry_after_s() == seconds


def test_clients_are_not_sent_to_come_together():
    pace = RetryAfterEstimator(64)
    assert len({pace.retry_after_s() for _ in range(8)}) == 8
