"""Sequences with a backlog of feature rows are sent in pieces."""

from __future__ import annotations

import torch
from drafter_scene import move
from drafting_scene import (
    WIDTH,
    K,
    Scene,
    rows_of,
    tokens_of,
)

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.model.tensors import decode_tensor
from verifier_service.drafters import sender as step_sender


def test_a_backlog_goes_in_pieces_and_the_last_asks_for_drafts(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_BACKLOG_ROWS", 8)
    scene = Scene()
    stream, _ = move(scene, 20)
    for _ in range(4):
        scene.flush()
    assert [rows_of(step) for step in stream.steps] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)]]
    assert [list(step.num_drafts) for step in stream.steps] == [[0], [0], [K]]
    assert [len(step.opened.ids) for step in stream.steps] == [1, 0, 0]


def test_a_piece_of_a_backlog_has_at_most_max_backlog_rows():
    scene = Scene()
    stream, _ = move(scene, step_sender.MAX_BACKLOG_ROWS + 1)
    scene.flush()
    scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[step_sender.MAX_BACKLOG_ROWS], [1]]


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
    one = scene.decode(6)  # before any drafter: nothing keeps its features
    stream = scene.connect()
    scene.flush()
    assert not stream.steps
    scene.verify(one, 2)
    scene.flush()
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
