"""A drafter that is too often late, or was expelled, is left alone, then tried with one sequence."""

from __future__ import annotations

import pytest
import torch
from drafting_scene import Clock, RecordedStream, Scene, answer_to

from draftwire.v1 import generate_pb2
from verifier_service.drafters import audit
from verifier_service.drafters.breaker import (
    LEAST_LATE_S,
    OVERDUE_S,
    RECENT_ANSWERS,
    REST_S,
    TOO_MANY_LATE,
    Breaker,
    Circuit,
)

DEADLINE_S = 1.0
READY, SLOW, PROBING = (
    generate_pb2.DRAFTER_STATE_READY,
    generate_pb2.DRAFTER_STATE_SLOW,
    generate_pb2.DRAFTER_STATE_PROBING,
)


@pytest.mark.parametrize("num_between", [0, 1, 6])
def test_late_answers_open_it_in_a_row_or_interleaved(num_between):
    breaker = Breaker(DEADLINE_S)
    for _ in range(TOO_MANY_LATE - 1):
        breaker.take_answer(1.1, 0.0)
        for _ in range(num_between):
            breaker.take_answer(1.0, 0.0)
    assert breaker.circuit is Circuit.CLOSED
    breaker.take_answer(1.1, 0.0)
    assert breaker.is_open


def test_a_late_answer_now_and_then_does_not_open_it():
    breaker = Breaker(DEADLINE_S)
    for number in range(100):
        breaker.take_answer(1.1 if number % (RECENT_ANSWERS // 2) == 0 else 1.0, 0.0)
    assert breaker.circuit is Circuit.CLOSED


@pytest.mark.parametrize(("deadline_s", "overdue_s"), [(0.1, OVERDUE_S), (1.0, 4.0)])
def test_an_answer_that_does_not_come_opens_it(deadline_s, overdue_s):
    breaker = Breaker(deadline_s)
    breaker.watch(100.0, 100.0 + overdue_s)
    assert breaker.circuit is Circuit.CLOSED
    breaker.watch(100.0, 100.1 + overdue_s)
    assert breaker.is_open


def test_it_is_retried_after_a_rest_and_closes_after_answers():
    breaker = Breaker(DEADLINE_S)
    breaker.watch(0.0, 10.0)
    breaker.watch(None, 10.0 + 0.9 * REST_S[0])
    assert breaker.is_open
    breaker.watch(0.0, 11.0)
    assert breaker.is_open
    breaker.watch(None, 11.0)
    assert breaker.is_on_trial
    for _ in range(RECENT_ANSWERS):
        assert breaker.is_on_trial
        breaker.take_answer(0.1, 11.0)
    assert breaker.circuit is Circuit.CLOSED


def test_a_failed_trial_doubles_the_rest_up_to_the_longest():
    breaker, now = Breaker(DEADLINE_S, on_trial=True), 0.0
    rests = []
    for _ in range(5):
        breaker.take_answer(2.0, now)
        began = now
        while breaker.is_open:
            now += 0.25
            breaker.watch(None, now)
        rests.append(now - began)
    assert rests == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_drafter_that_nobody_waits_for_may_take_a_moment():
    breaker = Breaker(0.0)
    for _ in range(TOO_MANY_LATE):
        breaker.take_answer(LEAST_LATE_S, 0.0)
    assert breaker.circuit is Circuit.CLOSED


def test_without_a_deadline_no_answer_is_late():
    breaker = Breaker(None)
    for _ in range(2 * TOO_MANY_LATE):
        breaker.take_answer(1e6, 0.0)
    breaker.watch(0.0, 1e6)
    assert breaker.circuit is Circuit.CLOSED


def make_slow(scene: Scene, stream: RecordedStream, clock: Clock) -> None:
    """The drafter is silent for too long, then answers all that it was sent."""
    scene.flush()
    clock.now += 5.0
    scene.flush()
    for step in list(stream.steps):
        scene.answer(stream, answer_to(step))


def test_a_slow_drafters_sequences_move_and_are_closed_there(clock):
    scene = Scene(deadline_s=DEADLINE_S, adaptive_k=False)
    slow = scene.connect()
    requests = [scene.decode() for _ in range(3)]
    scene.flush()
    other = scene.connect()
    clock.now += 5.0
    scene.flush()
    assert slow.states == [SLOW]
    assert len(other.last.sequence_ids) == len(requests)
    scene.answer(slow, answer_to(slow.steps[0]))
    scene.flush()
    assert list(slow.last.closed_ids) == [1, 2, 3]


def test_a_slow_drafter_gets_one_sequence_until_its_trial_ends(clock):
    scene = Scene(deadline_s=DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    requests = [scene.decode() for _ in range(3)]
    make_slow(scene, stream, clock)
    clock.now += 2 * REST_S[0]
    scene.flush()
    assert stream.states == [SLOW, PROBING]
    for _ in range(RECENT_ANSWERS):
        assert len(stream.last.sequence_ids) == 1
        scene.answer(stream)
        scene.verify(requests[0], 5)
        scene.flush()
    assert stream.states == [SLOW, PROBING, READY]
    assert len(stream.last.sequence_ids) == 3


def test_a_slow_drafter_that_is_the_only_one_holds_up_nobody(clock):
    scene = Scene(deadline_s=DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    request = scene.decode()
    make_slow(scene, stream, clock)
    scene.flush()
    assert scene.drafting.wait_policy.is_ready(request)
    assert not scene.drafting.wait_policy.is_awaited


def test_waiting_behind_an_earlier_answer_does_not_count(clock):
    scene = Scene(deadline_s=DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    for _ in range(2 * TOO_MANY_LATE):
        scene.decode()
        scene.flush()
    for step in list(stream.steps):
        clock.now += 0.9 * DEADLINE_S
        scene.answer(stream, answer_to(step))
        scene.flush()
    assert stream.states == []


def test_on_trial_all_is_redrawn_and_the_first_mismatch_expels(monkeypatch):
    monkeypatch.setattr(audit.random, "random", lambda: 0.999)  # none would be
    config = {"draft_sample_method": "gumbel", "draft_logits": "dense"}
    for on_trial in (False, True):
        scene = Scene(config)
        stream = scene.connect(on_trial=on_trial)
        scene.decode(temperature=1.0)
        scene.flush()
        logits = torch.full((3, 20), -100.0)
        logits[:, 4] = 100.0  # samples 4, but 5, 6, 7 are declared
        scene.answer(stream, answer_to(stream.last, logits=logits))
        assert stream.is_expelled == on_trial
