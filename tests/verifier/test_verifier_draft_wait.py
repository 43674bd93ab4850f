"""How long requests wait for drafts, and when a drafter counts as slow or lost."""

from __future__ import annotations

import pytest
import torch
from drafter_scene import start
from drafting_scene import (
    WIDTH,
    Clock,
    RecordedStream,
    Scene,
    answer_to,
    rows_of,
)

from draftwire.v1 import generate_pb2
from verifier_service.drafters import audit, breaker, drafting, placement
from verifier_service.drafters import session as draft_session
from verifier_service.drafters.breaker import (
    LEAST_LATE_S,
    OVERDUE_S,
    RECENT_ANSWERS,
    REST_S,
    TOO_MANY_LATE,
    Breaker,
    Circuit,
)

DEADLINE_S = 0.05


# Waits of requests.


def test_a_request_waits_for_its_drafts_until_the_deadline(clock):
    scene, _, one = start(deadline_s=DEADLINE_S)
    assert scene.drafting.next_deadline() == clock.now + DEADLINE_S
    clock.now += 0.9 * DEADLINE_S
    assert not scene.drafting.wait_policy.is_ready(one)
    clock.now += 0.2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)


def test_a_late_drafter_is_not_waited_for_until_it_answered_all(clock):
    scene, stream, one = start(deadline_s=DEADLINE_S)
    other = scene.decode()
    scene.flush()
    clock.now += 2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)
    scene.verify(one, 3)
    scene.step(other, 3)
    assert len(stream.steps) == 2  # a late drafter gets no further steps
    assert scene.drafting.wait_policy.is_ready(one)
    assert scene.drafting.wait_policy.is_ready(other)
    scene.answer(stream, answer_to(stream.steps[0]))
    scene.flush()
    assert len(stream.steps) == 2
    assert scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    scene.flush()
    assert rows_of(stream.last) == [(1, 4, 1), (2, 4, 1)]
    assert not scene.drafting.wait_policy.is_ready(one)
    assert not scene.drafting.wait_policy.is_ready(other)


def test_no_sequence_is_bound_to_a_late_drafter(clock):
    scene, _, one = start(deadline_s=DEADLINE_S)
    clock.now += 2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)
    scene.decode()
    scene.flush()
    assert scene.drafting.placement.sequences_at("drafter:1") == 1


def test_without_a_deadline_a_request_waits_for_its_drafts(clock):
    scene, stream, one = start()
    clock.now += 3600
    assert not scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    assert scene.drafting.wait_policy.is_ready(one)


def test_a_drafter_with_many_unanswered_steps_is_sent_no_more(clock, monkeypatch):
    monkeypatch.setattr(draft_session, "MAX_UNANSWERED_STEPS", 1)
    scene, stream, one = start(deadline_s=DEADLINE_S)
    scene.step(one, 3)
    assert len(stream.steps) == 1
    assert not scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    scene.flush()
    assert rows_of(stream.last) == [(1, 4, 1)]
    clock.now += 2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)


# Lost drafters.


def test_a_drafter_whose_answer_may_be_there_is_not_called_slow(clock):
    scene, stream, _ = start(deadline_s=0.05)
    clock.now += 2 * breaker.OVERDUE_S
    scene.drafting.flush(scene.requests, scene.stores, watches=False)
    assert stream.states == []
    scene.flush()
    assert stream.states == [generate_pb2.DRAFTER_STATE_SLOW]


def test_a_drafter_is_given_up_if_its_oldest_step_waits_for_long(clock):
    scene, stream, one = start()
    assert scene.drafting.next_deadline() == clock.now + placement.LOST_AFTER_S
    clock.now += 0.6 * placement.LOST_AFTER_S
    scene.step(one, 3)
    scene.drafting.placement.drop_lost()
    assert stream.failure is None
    clock.now += 0.6 * placement.LOST_AFTER_S
    scene.drafting.placement.drop_lost()
    assert (stream.failure, stream.is_expelled) == ("no answer in 10 s", False)
    assert scene.drafting.wait_policy.is_ready(one)
    assert scene.drafting.next_deadline() is None


def test_a_later_unanswered_step_counts_from_its_own_time(clock):
    scene, stream, one = start()
    clock.now += 0.6 * placement.LOST_AFTER_S
    scene.step(one, 3)
    scene.answer(stream, answer_to(stream.steps[0]))
    clock.now += 0.6 * placement.LOST_AFTER_S
    scene.drafting.placement.drop_lost()
    assert stream.failure is None


def test_an_answer_that_was_taken_after_long_still_counts(clock):
    scene, stream, one = start()
    clock.now += 2 * placement.LOST_AFTER_S
    scene.answer(stream)
    scene.drafting.placement.drop_lost()
    assert stream.failure is None
    assert one.drafts is not None


def test_a_drafter_that_has_answered_everything_is_never_lost(clock):
    scene, stream, _ = start()
    scene.answer(stream)
    clock.now += 3600
    scene.drafting.placement.drop_lost()
    assert stream.failure is None


def test_a_drafter_with_too_many_unanswered_bytes_is_given_up(monkeypatch):
    monkeypatch.setattr(drafting, "MAX_UNANSWERED_BYTES", 5 * 4 * WIDTH)
    scene, stream, one = start()
    scene.step(one, 3)
    assert stream.failure is None
    scene.step(one, 3)
    assert (stream.failure, stream.is_expelled) == (f"more than {5 * 4 * WIDTH} bytes are unanswered", False)
    assert scene.drafting.wait_policy.is_ready(one)


SLOW_DEADLINE_S = 1.0
READY, SLOW, PROBING = (
    generate_pb2.DRAFTER_STATE_READY,
    generate_pb2.DRAFTER_STATE_SLOW,
    generate_pb2.DRAFTER_STATE_PROBING,
)


@pytest.mark.parametrize("num_between", [0, 1, 6])
def test_late_answers_open_it_in_a_row_or_interleaved(num_between):
    breaker = Breaker(SLOW_DEADLINE_S)
    for _ in range(TOO_MANY_LATE - 1):
        breaker.take_answer(1.1, 0.0)
        for _ in range(num_between):
            breaker.take_answer(1.0, 0.0)
    assert breaker.circuit is Circuit.CLOSED
    breaker.take_answer(1.1, 0.0)
    assert breaker.is_open


def test_a_late_answer_now_and_then_does_not_open_it():
    breaker = Breaker(SLOW_DEADLINE_S)
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
    breaker = Breaker(SLOW_DEADLINE_S)
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
    breaker, now = Breaker(SLOW_DEADLINE_S, on_trial=True), 0.0
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
    """Let the drafter answer nothing for 5 s, which makes it slow, then answer all its steps."""
    scene.flush()
    clock.now += 5.0
    scene.flush()
    for step in list(stream.steps):
        scene.answer(stream, answer_to(step))


def test_a_slow_drafters_sequences_move_and_are_closed_there(clock):
    scene = Scene(deadline_s=SLOW_DEADLINE_S, adaptive_k=False)
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
    scene = Scene(deadline_s=SLOW_DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    requests = [scene.decode() for _ in range(3)]
    make_slow(scene, stream, clock)
    clock.now += 2 * REST_S[0]
    scene.flush()
    assert stream.states == [SLOW, PROBING]
    for _ in range(RECENT_ANSWERS):
        assert len(stream.last.sequence_ids) == 1
        scene.answer(stream)
        scene.step(requests[0], 5)
    assert stream.states == [SLOW, PROBING, READY]
    assert len(stream.last.sequence_ids) == 3


def test_a_slow_drafter_that_is_the_only_one_holds_up_nobody(clock):
    scene = Scene(deadline_s=SLOW_DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    request = scene.decode()
    make_slow(scene, stream, clock)
    scene.flush()
    assert scene.drafting.wait_policy.is_ready(request)
    assert not scene.drafting.wait_policy.is_awaited


def test_waiting_behind_an_earlier_answer_does_not_count(clock):
    scene = Scene(deadline_s=SLOW_DEADLINE_S, adaptive_k=False)
    stream = scene.connect()
    for _ in range(2 * TOO_MANY_LATE):
        scene.decode()
        scene.flush()
    for step in list(stream.steps):
        clock.now += 0.9 * SLOW_DEADLINE_S
        scene.answer(stream, answer_to(step))
        scene.flush()
    assert stream.states == []


def test_on_trial_all_is_redrawn_and_the_first_mismatch_expels(monkeypatch):
    monkeypatch.setattr(audit.random, "random", lambda: 0.999)  # no answer would be audited off trial
    config = {"draft_sample_method": "gumbel", "draft_logits": "dense"}
    for on_trial in (False, True):
        scene = Scene(config)
        stream = scene.connect(on_trial=on_trial)
        scene.decode(temperature=1.0)
        scene.flush()
        logits = torch.full((3, 20), -100.0)
        logits[:, 4] = 100.0  # these logits sample 4, but the drafts are 5, 6, 7
        scene.answer(stream, answer_to(stream.last, logits=logits))
        assert stream.is_expelled == on_trial
