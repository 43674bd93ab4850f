"""Which drafts of an answer are used, and which answers expel a drafter."""

from __future__ import annotations

import pytest
import torch
from drafter_scene import Change, start, tokens
from drafting_scene import (
    VOCAB,
    answer_to,
)

from draftwire.model.tensors import encode_tensor
from draftwire.v1 import draft_pb2 as pb


def test_drafts_that_continue_the_request_are_given_to_it():
    scene, stream, one = start()
    scene.answer(stream)
    assert (one.drafts.committed_length, one.drafts.last_token) == (5, 9)
    assert one.drafts.tokens == [5, 6, 7]
    assert scene.drafting.wait_policy.is_ready(one)


@pytest.mark.parametrize(("field", "value"), [("committed_lengths", 4), ("committed_lengths", 6), ("last_tokens", 8)])
def test_drafts_that_continue_something_else_are_not_used(field, value):
    scene, stream, one = start()
    answer = answer_to(stream.last)
    getattr(answer, field)[0] = value
    scene.answer(stream, answer)
    assert (one.drafts, stream.failure) == (None, None)
    assert scene.drafting.wait_policy.is_ready(one)


def test_drafts_for_what_the_request_was_before_are_not_used():
    scene, stream, one = start()
    scene.verify(one, 3)
    scene.flush()
    scene.answer(stream, answer_to(stream.steps[0]))
    assert one.drafts is None
    assert not scene.drafting.wait_policy.is_ready(one)
    scene.answer(stream)
    assert one.drafts.committed_length == 6


def test_fewer_drafts_than_asked_are_used():
    scene, stream, one = start()
    scene.answer(stream, answer_to(stream.last, [5]))
    assert one.drafts.tokens == [5]


def test_a_request_missing_in_an_answer_has_no_drafts():
    scene, stream, one = start()
    scene.answer(stream, pb.Drafts(step_id=1))
    assert (one.drafts, stream.failure) == (None, None)
    assert scene.drafting.wait_policy.is_ready(one)


WRONG: dict[str, tuple[Change, str]] = {
    "more than asked": (tokens(1, 2, 3, 4), "drafts.num_drafts = 4: allowed range [0, 3]"),
    "above the vocabulary": (tokens(1, VOCAB), f"drafts.tokens = {VOCAB}: token ids must be in [0, {VOCAB})"),
    "negative": (tokens(-1, 2), "drafts.tokens = -1: token ids must be in [0"),
    "fewer tokens than counted": (lambda a: a.num_drafts.__setitem__(0, 2), "drafts.tokens.shape = (3,): must be [2]"),
    "no tokens": (lambda a: a.ClearField("tokens"), "drafts.tokens.dtype"),
    "cut data": (lambda a: setattr(a.tokens, "data", a.tokens.data[:-1]), "drafts.tokens.data = '11 bytes'"),
    "statuses": (lambda a: a.statuses.append(1), "drafts.statuses = '2 entries': must be 1"),
    "committed_lengths": (lambda a: a.ClearField("committed_lengths"), "drafts.committed_lengths = '0 entries'"),
    "last_tokens": (lambda a: a.last_tokens.append(1), "drafts.last_tokens = '2 entries': must be 1"),
    "num_drafts": (lambda a: a.num_drafts.append(0), "drafts.num_drafts = '2 entries': must be 1"),
    "a step to come": (lambda a: setattr(a, "step_id", 2), "answered step 2, which had no answer due"),
    "more sequences than were sent": (lambda a: a.sequence_ids.extend([7] * 99), "more sequences than step 1 had rows"),
    "no time": (lambda a: setattr(a, "compute_time_s", float("nan")), "computed for nan s"),
    "endless time": (lambda a: setattr(a, "compute_time_s", float("inf")), "computed for inf s"),
    "negative time": (lambda a: setattr(a, "compute_time_s", -1.0), "computed for -1.0 s"),
    "no step": (lambda a: setattr(a, "step_id", 0), "answered step 0, which had no answer due"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_drafter_that_answers_what_it_must_not_is_expelled(name):
    change, text = WRONG[name]
    scene, stream, one = start()
    answer = answer_to(stream.last)
    change(answer)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert text in stream.failure
    assert one.drafts is None
    assert scene.drafting.wait_policy.is_ready(one)
    assert scene.drafting.placement.sequences_at(stream.address) == 0


def sure_answer(step: pb.DraftStep, *confidences: float) -> pb.Drafts:
    answer = answer_to(step)
    answer.confidences.CopyFrom(encode_tensor(torch.tensor(confidences, dtype=torch.float32)))
    return answer


def test_drafts_have_the_confidences_that_came_with_them():
    scene, stream, one = start(confidences=True)
    scene.answer(stream, sure_answer(stream.last, 1.0, 0.25, 0.0))
    assert one.drafts.confidences == [1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("confidences", "text"),
    [
        ((0.5, 1.5, 0.5), "drafts.confidences = 1.5: allowed range [0, 1]"),
        ((0.5, 0.5, -0.25), "drafts.confidences = -0.25: allowed range [0, 1]"),
        ((float("nan"), 0.5, 0.5), "drafts.confidences = nan: allowed range [0, 1]"),
        ((float("inf"), 0.5, 0.5), "drafts.confidences = inf: allowed range [0, 1]"),
        ((0.5, 0.5), "drafts.confidences.shape = (2,): must be [3]"),
    ],
    ids=["above 1", "negative", "nan", "inf", "too few"],
)
def test_a_drafter_with_wrong_confidences_is_expelled(confidences, text):
    scene, stream, one = start(confidences=True)
    scene.answer(stream, sure_answer(stream.last, *confidences))
    assert stream.is_expelled
    assert text in stream.failure
    assert one.drafts is None


def test_a_drafter_without_the_confidences_asked_for_is_expelled():
    scene, stream, _ = start(confidences=True)
    scene.answer(stream)
    assert "drafts.confidences.dtype" in stream.failure


def test_a_step_that_is_answered_twice_expels():
    scene, stream, _ = start()
    scene.answer(stream)
    scene.answer(stream)
    assert stream.is_expelled


def test_an_answer_takes_all_steps_before_it():
    scene, stream, one = start()
    scene.verify(one, 3)
    scene.flush()
    scene.answer(stream)
    assert one.drafts.committed_length == 6
    assert scene.drafting.next_deadline() is None


def test_requests_of_an_expelled_drafter_go_to_another_one():
    scene, stream, one = start()
    other = scene.connect()
    scene.answer(stream, answer_to(stream.last, [VOCAB]))
    scene.flush()
    scene.answer(other)
    assert one.drafts.tokens == [5, 6, 7]


def test_late_answers_of_an_abandoned_drafter_are_ignored():
    scene, stream, one = start()
    scene.answer(stream, answer_to(stream.last, [VOCAB]))
    scene.answer(stream)
    scene.disconnect(stream)
    assert one.drafts is None
