"""How long a request waits for drafts, and when a drafter counts as lost."""

from __future__ import annotations

from drafter_scene import start
from drafting_scene import (
    WIDTH,
    Scene,
    answer_to,
    rows_of,
)

from draftwire.v1 import generate_pb2
from verifier_service.drafters import breaker, drafting, placement
from verifier_service.drafters import session as draft_session

DEADLINE_S = 0.05


# How long a request waits.


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
    scene.verify(other, 3)
    scene.flush()
    assert len(stream.steps) == 2  # it has enough to do
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
    scene.verify(one, 3)
    scene.flush()
    assert len(stream.steps) == 1
    assert not scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    scene.flush()
    assert rows_of(stream.last) == [(1, 4, 1)]
    clock.now += 2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)


# Drafters that are lost.


def test_a_drafter_whose_answer_may_be_there_is_not_called_slow(clock):
    scene = Scene(deadline_s=0.05)
    stream = scene.connect()
    scene.decode()
    scene.flush()
    clock.now += 2 * breaker.OVERDUE_S
    scene.drafting.flush(scene.requests, scene.stores, watches=False)
    assert stream.states == []
    scene.flush()
    assert stream.states == [generate_pb2.DRAFTER_STATE_SLOW]


def test_a_drafter_is_given_up_if_its_oldest_step_waits_for_long(clock):
    scene, stream, one = start()
    assert scene.drafting.next_deadline() == clock.now + placement.LOST_AFTER_S
    clock.now += 0.6 * placement.LOST_AFTER_S
    scene.verify(one, 3)
    scene.flush()
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
    scene.verify(one, 3)
    scene.flush()
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
    scene.verify(one, 3)
    scene.flush()
    assert stream.failure is None
    scene.verify(one, 3)
    scene.flush()
    assert (stream.failure, stream.is_expelled) == (f"more than {5 * 4 * WIDTH} bytes are unanswered", False)
    assert scene.drafting.wait_policy.is_ready(one)
