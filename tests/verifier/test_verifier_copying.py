"""How many bytes the host copies into a message while a step is to be launched."""

from __future__ import annotations

import pytest

from verifier_service.pacing import CopyLimit
from verifier_service.pacing.copying import FIRST_BYTES, LATE_SHARE, LEAST_BYTES, MOST_BYTES, STEPS_BEHIND

STEP_S = 7e-3
LATE_S = 2 * LATE_SHARE * STEP_S


def send(limit: CopyLimit, slack_s: float, byte_s: float, steps: int) -> list[float]:
    """As much as is allowed is sent before each launch; the bytes of each message."""
    sent = []
    for _ in range(steps):
        sent.append(limit.num_bytes)
        limit.count_sent(int(sent[-1]))
        limit.count_step(STEP_S, max(0.0, byte_s * sent[-1] - slack_s))
    return sent


@pytest.mark.parametrize("slack_s", [2e-3, 5e-3, 10e-3])
def test_messages_take_what_a_step_hides(slack_s):
    byte_s = 2e-9
    sent = send(CopyLimit(), slack_s, byte_s, 200)[100:]
    most = (slack_s + LATE_SHARE * STEP_S) / byte_s
    assert 0.6 * most < min(sent) < max(sent) <= 1.1 * most


def test_the_limit_stays_within_bounds():
    limit = CopyLimit()
    assert limit.num_bytes == FIRST_BYTES
    send(limit, 0.0, 1.0, 100)
    assert limit.num_bytes == LEAST_BYTES
    send(limit, 1.0, 0.0, 1000)
    assert limit.num_bytes == MOST_BYTES


def test_messages_that_take_less_show_nothing_while_steps_are_in_time():
    limit = CopyLimit()
    for _ in range(100):
        limit.count_sent(FIRST_BYTES // 2)
        limit.count_step(STEP_S, 0.0)
    assert limit.num_bytes == FIRST_BYTES


def test_a_message_that_is_small_says_nothing_of_a_step_that_comes_late():
    limit = CopyLimit()
    for _ in range(100):
        limit.count_sent(FIRST_BYTES // 3)
        limit.count_step(STEP_S, LATE_S)
    assert limit.num_bytes == FIRST_BYTES


def test_a_step_that_comes_late_says_nothing_of_what_was_not_sent():
    limit = CopyLimit()
    for _ in range(100):
        limit.count_step(STEP_S, LATE_S)
    assert limit.num_bytes == FIRST_BYTES


def test_a_message_delays_one_of_the_steps_behind_it():
    for steps in range(STEPS_BEHIND + 1):
        limit = CopyLimit()
        limit.count_sent(FIRST_BYTES // 2)
        for _ in range(steps):
            limit.skip_step()
        limit.count_step(STEP_S, LATE_S)
        assert (limit.num_bytes < FIRST_BYTES) == (steps < STEPS_BEHIND)
