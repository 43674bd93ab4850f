"""A drafter that drains answers what it was sent; then its stream ends and its sequences move."""

from __future__ import annotations

from drafting_scene import Scene, refusal_of, rows_of

from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters.stream import Draining


def test_sequences_move_once_the_drafter_answered_and_use_drafts():
    scene = Scene()
    draining = scene.connect()
    request = scene.decode()
    scene.flush()
    other = scene.connect()
    scene.drafting.handle(Draining(draining))
    scene.flush()
    assert not draining.has_ended
    assert not other.steps
    scene.answer(draining)
    assert request.drafts is not None
    scene.flush()
    assert draining.has_ended
    assert len(draining.steps) == 1
    assert rows_of(other.last) == [(1, 0, request.num_feature_rows)]


def test_a_drafter_that_has_nothing_to_answer_is_left_at_once():
    scene = Scene()
    stream = scene.connect()
    scene.drafting.handle(Draining(stream))
    scene.flush()
    assert stream.has_ended
    assert stream.failure is None


def test_a_draining_drafter_gets_no_sequence_and_all_decode():
    scene = Scene()
    stream = scene.connect()
    first = scene.decode()
    scene.flush()
    scene.drafting.handle(Draining(stream))
    second = scene.decode()
    scene.flush()
    assert len(stream.steps) == 1
    assert scene.drafting.wait_policy.is_ready(second)
    scene.answer(stream)
    scene.verify(first, 5)
    scene.flush()
    assert len(stream.steps) == 1
    assert scene.drafting.wait_policy.is_ready(first)


def test_a_sequence_not_open_at_a_draining_drafter_moves_now():
    scene = Scene()
    draining = scene.connect()
    scene.decode()
    scene.flush()
    other = scene.connect()
    scene.drafting.handle(Draining(draining))
    scene.answer(draining, refusal_of(draining.last, pb.SEQUENCE_STATUS_NO_CAPACITY))
    scene.flush()
    assert len(other.steps) == 1


def test_a_draining_drafter_that_dies_is_like_any_that_dies():
    scene = Scene()
    draining = scene.connect()
    scene.decode()
    scene.flush()
    other = scene.connect()
    scene.drafting.handle(Draining(draining))
    scene.disconnect(draining)
    scene.flush()
    assert not draining.has_ended
    assert len(other.steps) == 1
