"""The rows that drafters get of a request, from its first rows to its end."""

from __future__ import annotations

import pytest
import torch
from drafter_scene import DENSE, GUMBEL, move, start
from drafting_scene import (
    WIDTH,
    K,
    Scene,
    answer_to,
    refusal_of,
    rows_of,
    tokens_of,
)

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.model.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters import sender as step_sender
from verifier_service.drafters.stream import Draining

COUPLED = {"rejection_sample_method": "coupled"}


# Rows that are sent.


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
    scene.step(one, 3, 8)
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
    scene.step(one, 3)
    assert [rows_of(step) for step in stream.steps[1:]] == [[(1, 4, 1), (2, 0, 4)], [(3, 0, 20)]]
    assert [list(step.num_drafts) for step in stream.steps[1:]] == [[K, K], [K]]
    scene.answer(stream, answer_to(stream.steps[1]))
    assert [one.drafts is None, short.drafts is None, long.drafts is None] == [False, False, True]
    assert not scene.drafting.wait_policy.is_ready(long)


def test_a_request_without_speculation_goes_to_no_drafter():
    scene, stream, one = start(k=0)
    assert not stream.steps
    assert scene.drafting.wait_policy.is_ready(one)


@pytest.mark.parametrize(("left", "asked"), [(10, K), (5, K), (4, K), (3, 2), (2, 1), (1, 0)])
def test_no_more_drafts_are_asked_than_the_request_has_room_for(left, asked):
    """A step emits at most one token more than its drafts; `left` tokens remain of max_tokens."""
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


def test_a_backlog_goes_in_pieces_and_the_last_asks_for_drafts(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_ROWS", 8)
    scene = Scene()
    stream, _ = move(scene, 20)
    for _ in range(4):
        scene.flush()
    assert [rows_of(step) for step in stream.steps] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)]]
    assert [list(step.num_drafts) for step in stream.steps] == [[0], [0], [K]]
    assert [len(step.opened.ids) for step in stream.steps] == [1, 0, 0]


def test_new_rows_of_other_sequences_go_whole_beside_a_piece(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_ROWS", 8)
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_BYTES", 8 * 4 * WIDTH)
    scene = Scene()
    stream, _ = move(scene, 20)
    scene.flush()
    scene.decode(40)
    scene.flush()
    assert rows_of(stream.last) == [(1, 8, 8), (2, 0, 40)]
    assert list(stream.last.num_drafts) == [0, K]


def test_all_backlogs_of_a_message_share_the_bytes(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_BYTES", 15 * 4 * WIDTH)
    scene = Scene()
    stream, _ = move(scene, 10, 10, 10)
    scene.flush()
    scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[10, 5], [5, 10]]


def test_a_row_wider_than_the_bytes_still_goes(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_BYTES", 1)
    scene = Scene()
    stream, _ = move(scene, 3)
    for _ in range(4):
        scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[1], [1], [1]]


def test_sequence_ids_rise_however_backlogs_are_split(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_BYTES", 4 * 4 * WIDTH)
    scene = Scene()
    stream, requests = move(scene, 8, 10)
    requests = [*requests, scene.decode(11)]
    for _ in range(5):
        scene.flush()
    assert [sequence_id for step in stream.steps for sequence_id in step.opened.ids] == [1, 2, 3]
    assert len(stream.steps) > 1  # no backlog fits into one message
    sent: dict[int, list[int]] = {}
    for step in stream.steps:
        tokens = iter(tokens_of(step))
        for number, _, num_rows in rows_of(step):
            sent.setdefault(number, []).extend(next(tokens) for _ in range(num_rows))
    assert sorted(sent.values()) == sorted(request.tokens[1:] for request in requests)


def test_a_backlog_begins_at_the_first_row_that_has_features():
    scene = Scene()
    one = scene.decode(6)  # computed before a drafter connects, so its features are not stored
    stream = scene.connect()
    scene.flush()
    assert not stream.steps
    scene.step(one, 2)
    assert (list(stream.last.opened.first_rows), rows_of(stream.last)) == ([6], [(1, 6, 1)])
    assert list(stream.last.num_drafts) == [K]


def test_a_found_prefix_is_sent_with_its_features_and_tokens():
    scene = Scene()
    stream = scene.connect()
    former = scene.decode(2 * BLOCK_SIZE)
    one = scene.reuse(former, num_blocks=1, prompt_length=BLOCK_SIZE + 3)
    scene.end(former)
    scene.compute(one, 3)
    one.tokens.append(9)
    scene.flush()
    assert rows_of(stream.last) == [(1, 0, BLOCK_SIZE + 3)]
    assert tokens_of(stream.last) == one.tokens[1:]
    features = decode_tensor(stream.last.features, "features", torch.float32, (BLOCK_SIZE + 3, WIDTH))
    assert features[:, 0].tolist() == [*range(10000, 10000 + BLOCK_SIZE), *(20000 + BLOCK_SIZE + i for i in range(3))]
    assert list(stream.last.num_drafts) == [K]


def test_a_found_prefix_is_sent_in_pieces_like_any_backlog(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_ROWS", BLOCK_SIZE)
    scene = Scene()
    stream = scene.connect()
    former = scene.decode(2 * BLOCK_SIZE)
    one = scene.reuse(former, num_blocks=2, prompt_length=2 * BLOCK_SIZE + 5)
    scene.end(former)
    scene.compute(one, 5)
    one.tokens.append(9)
    for _ in range(3):
        scene.flush()
    assert [rows_of(step) for step in stream.steps] == [[(1, 0, 16)], [(1, 16, 16)], [(1, 32, 5)]]


def test_of_a_prefix_from_before_the_drafter_nothing_is_sent():
    scene = Scene()
    former = scene.decode(2 * BLOCK_SIZE)
    scene.end(former)
    stream = scene.connect()
    one = scene.reuse(former, num_blocks=1, prompt_length=BLOCK_SIZE + 3)
    scene.compute(one, 3)
    one.tokens.append(9)
    scene.flush()
    assert (list(stream.last.opened.first_rows), rows_of(stream.last)) == ([16], [(1, 16, 3)])


def test_sequences_move_once_the_drafter_answered_and_use_drafts():
    scene, draining, request = start()
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
    scene, stream, first = start()
    scene.drafting.handle(Draining(stream))
    second = scene.decode()
    scene.flush()
    assert len(stream.steps) == 1
    assert scene.drafting.wait_policy.is_ready(second)
    scene.answer(stream)
    scene.step(first, 5)
    assert len(stream.steps) == 1
    assert scene.drafting.wait_policy.is_ready(first)


def test_a_sequence_not_open_at_a_draining_drafter_moves_now():
    scene, draining, _ = start()
    other = scene.connect()
    scene.drafting.handle(Draining(draining))
    scene.answer(draining, refusal_of(draining.last, pb.SEQUENCE_STATUS_NO_CAPACITY))
    scene.flush()
    assert len(other.steps) == 1


def test_a_draining_drafter_that_dies_is_like_any_that_dies():
    scene, draining, _ = start()
    other = scene.connect()
    scene.drafting.handle(Draining(draining))
    scene.disconnect(draining)
    scene.flush()
    assert not draining.has_ended
    assert len(other.steps) == 1
