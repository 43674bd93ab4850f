"""What drafters are sent of a request, from its first rows to its end."""

from __future__ import annotations

import pytest
import torch
from drafter_scene import DENSE, GUMBEL, move, start
from drafting_scene import (
    WIDTH,
    K,
    Scene,
    answer_to,
    rows_of,
    tokens_of,
)

from draftwire.model.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters import sender as step_sender

COUPLED = {"rejection_sample_method": "coupled"}


# What is sent.


def test_a_decoding_sequence_opens_with_all_rows_and_asks_drafts():
    _, stream, one = start(temperature=0.5)
    (step,) = stream.steps
    assert (step.step_id, list(step.opened.ids), list(step.opened.first_rows)) == (1, [1], [0])
    assert list(step.opened.temperatures) == [0.5]
    assert (rows_of(step), list(step.num_drafts)) == ([(1, 0, 4)], [K])
    assert tokens_of(step) == one.tokens[1:]


def test_row_i_has_features_of_i_and_the_token_after_it():
    scene, stream, one = start()
    other = scene.decode()
    scene.verify(one, 3, 8)
    scene.flush()
    features = decode_tensor(stream.last.features, "features", torch.float32, (6, WIDTH))
    assert rows_of(stream.last) == [(1, 4, 2), (2, 0, 4)]
    assert tokens_of(stream.last) == [3, 8, *other.tokens[1:]]
    assert features[:, 0].tolist() == features[:, -1].tolist() == [10004, 10005, 20000, 20001, 20002, 20003]


def test_features_are_sent_in_the_type_of_the_head():
    scene = Scene()
    stream = scene.connect(dtype=torch.bfloat16, row_bytes=2 * WIDTH)
    scene.decode()
    scene.flush()
    assert (stream.last.features.dtype, len(stream.last.features.data)) == (pb.DTYPE_BFLOAT16, 4 * 2 * WIDTH)


def test_a_prompt_in_pieces_feeds_the_head_and_asks_nothing():
    scene = Scene()
    stream = scene.connect()
    one = scene.admit(10)
    scene.compute(one, 6)
    scene.flush()
    assert (rows_of(stream.last), list(stream.last.num_drafts)) == ([(1, 0, 6)], [0])
    scene.compute(one, 4)
    one.tokens.append(9)
    scene.flush()
    assert (rows_of(stream.last), list(stream.last.num_drafts)) == ([(1, 6, 4)], [K])


def test_prompt_rows_follow_decoding_rows_in_their_own_message():
    scene, stream, one = start()
    long, short = scene.decode(20), scene.decode(K + 1)
    scene.verify(one, 3)
    scene.flush()
    assert [rows_of(step) for step in stream.steps[1:]] == [[(1, 4, 1), (2, 0, 4)], [(3, 0, 20)]]
    assert [list(step.num_drafts) for step in stream.steps[1:]] == [[K, K], [K]]
    scene.answer(stream, answer_to(stream.steps[1]))
    assert [one.drafts is None, short.drafts is None, long.drafts is None] == [False, False, True]
    assert not scene.drafting.wait_policy.is_ready(long)


def test_where_nothing_is_new_nothing_is_sent():
    scene, stream, _ = start()
    scene.flush()
    assert len(stream.steps) == 1


def test_a_request_without_speculation_goes_to_no_drafter():
    scene, stream, one = start(k=0)
    assert not stream.steps
    assert scene.drafting.wait_policy.is_ready(one)


@pytest.mark.parametrize(("left", "asked"), [(10, K), (5, K), (4, K), (3, 2), (2, 1), (1, 0)])
def test_no_more_drafts_are_asked_than_the_request_has_room_for(left, asked):
    """A verify step emits one token more than it has drafts; `left` tokens remain of max_tokens."""
    scene, stream, one = start(max_tokens=left + 1)
    assert list(stream.last.num_drafts) == [asked]
    assert scene.drafting.wait_policy.is_ready(one) == (asked == 0)


def test_no_more_drafts_are_asked_than_the_head_makes():
    scene = Scene()
    stream = scene.connect(max_drafts=2)
    scene.decode()
    scene.flush()
    assert list(stream.last.num_drafts) == [2]


@pytest.mark.parametrize(
    ("config", "key"),
    [({}, 0), (COUPLED, 0), (GUMBEL, 101), (DENSE, 101), ({**GUMBEL, **COUPLED}, 103)],
    ids=["greedy", "greedy coupled", "gumbel", "dense", "gumbel coupled"],
)
def test_a_drafter_gets_the_one_key_that_it_draws_with(config, key):
    _, stream, one = start(config)
    assert (one.keys.proposal, one.keys.resample) == (101, 103)
    assert list(stream.last.opened.proposal_keys) == [key]


# The end of a request.


def test_an_ended_request_is_closed_with_the_next_step():
    scene, stream, one = start()
    scene.end(one)
    scene.flush()
    assert (list(stream.last.closed_ids), rows_of(stream.last)) == ([1], [])
    scene.flush()
    assert len(stream.steps) == 2


def test_an_ended_request_that_was_never_opened_is_not_closed(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_BYTES", 4 * 4 * WIDTH)
    scene = Scene()
    stream, (_, paced) = move(scene, 8, 10)
    scene.flush()
    scene.end(paced)
    scene.flush()
    scene.flush()
    assert not any(step.closed_ids for step in stream.steps)


def test_drafts_for_an_ended_request_are_ignored():
    scene, stream, one = start()
    scene.end(one)
    scene.answer(stream)
    assert (one.drafts, stream.failure) == (None, None)
