"""Which sequences draft where, what drafters are sent, how long they are waited for and which drafts are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting_scene import (
    CPU,
    VOCAB,
    WIDTH,
    K,
    RecordedStream,
    Scene,
    answer_to,
    refusal_of,
    rows_of,
    tokens_of,
)

from draftwire.contract.tensors import decode_tensor, encode_tensor
from draftwire.model.fusion import FeatureFusion
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from draftwire_kernels import gumbel_sample
from verifier_service.core.request import AnswerLogits, ReadyDrafts, Request
from verifier_service.drafters import audit as redraws
from verifier_service.drafters import breaker, drafting, placement
from verifier_service.drafters import sender as step_sender
from verifier_service.drafters import session as draft_session
from verifier_service.drafters.answers import find_belied
from verifier_service.drafters.features import FeatureKind
from verifier_service.drafters.stream import Loaded

DEADLINE_S = 0.05
COUPLED = {"rejection_sample_method": "coupled"}
GUMBEL = {"draft_sample_method": "gumbel"}
DENSE = {**GUMBEL, "draft_logits": "dense"}
TOP_N = {**GUMBEL, "draft_logits": {"top_n": 4}}


def start(
    config: dict[str, Any] | None = None, deadline_s: float | None = None, *, confidences: bool = False, **request: Any
) -> Any:
    """(scene, stream, request): the request's rows are sent and drafts asked for."""
    scene = Scene(config, deadline_s)
    stream = scene.connect(confidences=confidences)
    one = scene.decode(**request)
    scene.flush()
    return scene, stream, one


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


# Histories.


def move(scene: Scene, *lengths: int) -> tuple[RecordedStream, list[Request]]:
    """Requests with so long prompts lose their drafter; the one that comes has to be sent their histories."""
    first = scene.connect()
    requests = [scene.decode(length) for length in lengths]
    scene.flush()
    scene.disconnect(first)
    return scene.connect(), requests


def test_a_history_goes_in_pieces_and_the_last_asks_for_drafts(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_ROWS", 8)
    scene = Scene()
    stream, _ = move(scene, 20)
    for _ in range(4):
        scene.flush()
    assert [rows_of(step) for step in stream.steps] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)]]
    assert [list(step.num_drafts) for step in stream.steps] == [[0], [0], [K]]
    assert [len(step.opened.ids) for step in stream.steps] == [1, 0, 0]


def test_a_piece_of_a_history_has_at_most_max_history_rows():
    scene = Scene()
    stream, _ = move(scene, step_sender.MAX_HISTORY_ROWS + 1)
    scene.flush()
    scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[step_sender.MAX_HISTORY_ROWS], [1]]


def test_new_rows_of_other_sequences_go_whole_beside_a_piece(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_ROWS", 8)
    monkeypatch.setattr(step_sender, "MAX_HISTORY_BYTES", 8 * 4 * WIDTH)
    scene = Scene()
    stream, _ = move(scene, 20)
    scene.flush()
    scene.decode(40)
    scene.flush()
    assert rows_of(stream.last) == [(1, 8, 8), (2, 0, 40)]
    assert list(stream.last.num_drafts) == [0, K]


def test_all_histories_of_a_message_share_the_bytes(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_BYTES", 15 * 4 * WIDTH)
    scene = Scene()
    stream, _ = move(scene, 10, 10, 10)
    scene.flush()
    scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[10, 5], [5, 10]]


def test_a_row_wider_than_the_bytes_still_goes(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_BYTES", 1)
    scene = Scene()
    stream, _ = move(scene, 3)
    for _ in range(4):
        scene.flush()
    assert [list(step.num_rows) for step in stream.steps] == [[1], [1], [1]]


def test_sequence_ids_rise_however_histories_are_split(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_BYTES", 4 * 4 * WIDTH)
    scene = Scene()
    stream, requests = move(scene, 8, 10)
    requests = [*requests, scene.decode(11)]
    for _ in range(5):
        scene.flush()
    assert [sequence_id for step in stream.steps for sequence_id in step.opened.ids] == [1, 2, 3]
    assert len(stream.steps) > 1  # no history fits into one message
    sent: dict[int, list[int]] = {}
    for step in stream.steps:
        tokens = iter(tokens_of(step))
        for number, _, num_rows in rows_of(step):
            sent.setdefault(number, []).extend(next(tokens) for _ in range(num_rows))
    assert sorted(sent.values()) == sorted(request.tokens[1:] for request in requests)


def test_a_history_begins_at_the_first_row_that_has_features():
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


def test_a_found_prefix_is_sent_in_pieces_like_any_history(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_ROWS", BLOCK_SIZE)
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


# Which drafter.


def test_a_request_longer_than_the_heads_positions_is_not_bound():
    scene = Scene()
    small = scene.connect(max_model_len=7)
    fits, too_long = scene.decode(7), scene.decode(8)
    scene.flush()
    assert list(small.last.num_rows) == [7]
    assert (scene.drafting.wait_policy.is_ready(fits), scene.drafting.wait_policy.is_ready(too_long)) == (False, True)
    large = scene.connect(max_model_len=8)
    scene.flush()
    assert list(large.last.num_rows) == [8]


def test_a_new_sequence_goes_to_the_emptiest_drafter_and_stays():
    scene = Scene()
    first, second = scene.connect(), scene.connect()
    one = scene.decode()
    scene.flush()
    scene.decode()
    scene.flush()
    assert (len(first.steps), len(second.steps)) == (1, 1)
    assert scene.drafting.placement.sequences_at("drafter:1") == 2
    scene.verify(one, 3)
    scene.flush()
    assert (rows_of(first.last), len(second.steps)) == ([(1, 4, 1)], 1)


def loads(sequences: int, kv_cache_usage: float = 0.0) -> pb.DrafterLoad:
    return pb.DrafterLoad(sequences=sequences, kv_cache_usage=kv_cache_usage)


@pytest.mark.parametrize(
    ("first", "second", "sizes", "chosen"),
    [
        (loads(7), loads(2), (100, 100), 1),  # what other verifiers have there counts
        (loads(7), loads(2), (100, 10), 0),  # as a share of what it takes
        (loads(2, 0.9), loads(7, 0.1), (100, 100), 1),  # and so does a cache that is fuller than that
        (loads(0), loads(0), (10, 100), 0),
    ],
)
def test_a_new_sequence_goes_to_the_least_occupied_drafter(first, second, sizes, chosen):
    scene = Scene()
    streams = [scene.connect(max_sequences=size) for size in sizes]
    for stream, load in zip(streams, (first, second), strict=True):
        scene.drafting.handle(Loaded(stream, load))
    scene.decode()
    scene.flush()
    assert [len(stream.steps) for stream in streams] == [int(i == chosen) for i in range(2)]


def test_own_sequences_count_once_and_at_once():
    scene = Scene()
    first, second = scene.connect(), scene.connect()
    scene.drafting.handle(Loaded(second, loads(3)))
    for _ in range(2):
        scene.decode()
        scene.flush()
    answer = answer_to(first.last)
    answer.load.sequences = 2  # its own
    scene.answer(first, answer)
    for _ in range(3):  # to 3 and 4 at the first, then to the second as well
        scene.decode()
        scene.flush()
    opened = [sum(len(step.opened.ids) for step in stream.steps) for stream in (first, second)]
    assert opened == [4, 1]


def test_a_drafter_gets_no_more_sequences_than_it_takes():
    scene = Scene()
    stream = scene.connect(max_sequences=1)
    one, other = scene.decode(), scene.decode()
    scene.flush()
    assert list(stream.last.sequence_ids) == [1]
    assert scene.drafting.wait_policy.is_ready(other)
    scene.end(one)
    scene.flush()
    assert (list(stream.last.closed_ids), list(stream.last.opened.ids)) == ([1], [2])


def test_requests_of_a_lost_drafter_move_and_are_sent_whole():
    scene, stream, one = start()
    scene.verify(one, 3)
    scene.flush()
    scene.disconnect(stream)
    assert scene.drafting.wait_policy.is_ready(one)
    other = scene.connect()
    scene.flush()
    assert (list(other.last.opened.ids), rows_of(other.last)) == ([1], [(1, 0, 5)])
    assert list(other.last.num_drafts) == [K]
    assert not scene.drafting.wait_policy.is_ready(one)


def test_heads_of_different_layers_get_their_own_features():
    scene = Scene()
    wide, narrow = scene.connect(), scene.connect(layers=(2,))
    scene.decode()
    scene.decode()
    assert scene.drafting.feature_kinds == {FeatureKind((1, 3)), FeatureKind((2,))}
    scene.flush()
    assert [list(stream.last.features.shape) for stream in (wide, narrow)] == [[4, 4], [4, 2]]


def fusing_head(fingerprint: str, factor: float) -> dict[str, Any]:
    """A head of two states: `factor` times the sum of a row's features, twice."""
    fusion = FeatureFusion(torch.full((2, WIDTH), factor, dtype=torch.float32))
    return {"fingerprint": fingerprint, "fusion": fusion, "fusion_digest": str(factor), "row_bytes": 8}


def states_of(stream: RecordedStream) -> list[list[float]]:
    rows = sum(stream.last.num_rows)
    return decode_tensor(stream.last.features, "features", torch.float32, (rows, 2)).tolist()


def test_every_head_gets_what_its_own_fusion_makes():
    scene = Scene()
    one, other, raw = (
        scene.connect(**fusing_head("a", 1)),
        scene.connect(**fusing_head("b", 2)),
        scene.connect(),
    )
    for _ in range(3):
        scene.decode(2)
    scene.flush()
    rows = [10000, 10001]
    assert states_of(one) == [[WIDTH * row] * 2 for row in rows]
    assert states_of(other) == [[2 * WIDTH * (row + 10000)] * 2 for row in rows]
    assert raw.last.features.shape == [2, WIDTH]


def test_heads_with_other_fingerprints_share_no_features():
    scene = Scene()
    scene.connect(**fusing_head("a", 1))
    scene.connect(**fusing_head("b", 1))
    scene.connect(**fusing_head("a", 1))
    assert len(scene.stores) == len(scene.drafting.feature_kinds) == 2


def test_a_late_head_gets_no_features_fused_for_another():
    scene = Scene()
    first = scene.connect(**fusing_head("a", 1))
    one = scene.decode()
    scene.flush()
    scene.disconnect(first)
    late = scene.connect(**fusing_head("b", 2))
    scene.verify(one, 3)
    scene.flush()
    assert rows_of(late.last) == [(1, 4, 1)]
    assert states_of(late) == [[2 * WIDTH * 10004.0] * 2]


@pytest.mark.parametrize("status", [pb.SEQUENCE_STATUS_UNKNOWN, pb.SEQUENCE_STATUS_NO_CAPACITY])
def test_an_unknown_sequence_reopens_after_a_delay_that_doubles(status, clock):
    scene, stream, one = start()
    shortest, longest = placement.REOPEN_DELAY_S
    for delay in (shortest, 2 * shortest, 4 * shortest):
        scene.answer(stream, refusal_of(stream.last, status))
        assert scene.drafting.wait_policy.is_ready(one)
        steps = len(stream.steps)
        clock.now += 0.99 * delay
        scene.flush()
        assert len(stream.steps) == steps
        clock.now += 0.02 * delay
        scene.flush()
        assert len(stream.steps) == steps + 1
        assert (list(stream.last.opened.ids), rows_of(stream.last)) == ([steps + 1], [(steps + 1, 0, 4)])
    for _ in range(10):
        scene.answer(stream, refusal_of(stream.last, status))
        clock.now += longest
        scene.flush()
    assert len(stream.steps) == 14
    assert not any(step.closed_ids for step in stream.steps)


def test_a_sequence_unknown_to_the_drafter_disturbs_no_other(clock):  # noqa: ARG001
    scene, stream, lost = start()
    kept = scene.decode()
    scene.flush()
    answer = answer_to(stream.last)
    answer.MergeFrom(refusal_of(stream.steps[0], pb.SEQUENCE_STATUS_UNKNOWN))
    answer.step_id = 2
    scene.answer(stream, answer)
    assert (lost.drafts, kept.drafts.tokens) == (None, [5, 6, 7])
    assert stream.failure is None


# The end of a request.


def test_an_ended_request_is_closed_with_the_next_step():
    scene, stream, one = start()
    scene.end(one)
    scene.flush()
    assert (list(stream.last.closed_ids), rows_of(stream.last)) == ([1], [])
    scene.flush()
    assert len(stream.steps) == 2


def test_an_ended_request_that_was_never_opened_is_not_closed(monkeypatch):
    monkeypatch.setattr(step_sender, "MAX_HISTORY_BYTES", 4 * 4 * WIDTH)
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


# Which drafts are used.


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


Change = Callable[[pb.Drafts], Any]


def tokens(*values: int) -> Change:
    def change(answer: pb.Drafts) -> None:
        answer.num_drafts[0] = len(values)
        answer.tokens.CopyFrom(encode_tensor(torch.tensor(values, dtype=torch.int32)))

    return change


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


# Draft logits.

REDUCED = torch.tensor([1, 4, 5, 6, 7, 11, 19])


def start_sampled(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], ids: torch.Tensor | None = None) -> Any:
    """(scene, stream, request) at temperature 0.8, where every draft is drawn again."""
    monkeypatch.setattr(redraws, "REDRAW_SHARE", 1)
    scene = Scene(config)
    stream = scene.connect(draft_token_ids=ids, draft_vocab_size=VOCAB if ids is None else len(ids))
    one = scene.decode(temperature=0.8, max_tokens=1000)
    scene.flush()
    return scene, stream, one


def honest_answer(step: pb.DraftStep, key: int, config: dict[str, Any], ids: torch.Tensor | None) -> pb.Drafts:
    """Drafts drawn as a drafter draws them."""
    ((_, first, rows),), (count,) = rows_of(step), step.num_drafts
    draw = torch.Generator().manual_seed(step.step_id)
    width = VOCAB if ids is None else len(ids)
    form = config["draft_logits"]
    if form != "dense":
        width = form["top_n"]
    logits = 2 * torch.randn(count, width, generator=draw)
    drawn, columns = [], []
    for j in range(count):
        own = ids if form == "dense" else torch.randperm(VOCAB, generator=draw)[:width]
        column = gumbel_sample(
            logits[j : j + 1],
            torch.tensor([0.8]),
            torch.tensor([key]),
            torch.tensor([first + rows + 1 + j]),
            draft_offset=j,
            token_ids=own,
            use_fp64=config.get("use_fp64_gumbel", False),
        )
        drawn.append(int(column if own is None else own[column]))
        columns.append(own)
    answer = answer_to(step, drawn, logits)
    if form != "dense":
        encode_tensor(torch.stack(columns).int(), answer.logits_token_ids)
    return answer


HONEST = [
    (DENSE, None),
    (DENSE, REDUCED),
    ({**DENSE, "use_fp64_gumbel": True}, REDUCED),
    (TOP_N, None),
    (TOP_N, REDUCED),
]


@pytest.mark.parametrize(
    ("config", "ids"), HONEST, ids=["dense", "dense reduced", "dense reduced fp64", "top_n", "top_n reduced"]
)
def test_drafts_that_are_drawn_from_their_logits_never_expel(config, ids, monkeypatch):
    scene, stream, one = start_sampled(monkeypatch, config, ids)
    for _ in range(40):
        scene.answer(stream, honest_answer(stream.last, one.keys.proposal, config, ids))
        assert stream.failure is None
        assert one.drafts is not None
        scene.verify(one, 3)
        scene.flush()


@pytest.mark.parametrize(("config", "ids"), [HONEST[0], HONEST[1], HONEST[3]], ids=["dense", "dense reduced", "top_n"])
def test_drafts_not_drawn_from_logits_are_unused_and_expel(config, ids, monkeypatch):
    scene, stream, one = start_sampled(monkeypatch, config, ids)
    for _ in range(redraws.TOO_MANY_MISMATCHES):
        assert stream.failure is None
        scene.answer(stream, replace_last(honest_answer(stream.last, one.keys.proposal, config, ids)))
        assert one.drafts is None
        scene.verify(one, 3)
        scene.flush()
    assert stream.is_expelled
    assert "are not what its logits sample" in stream.failure


@pytest.mark.parametrize("form", ["dense", "dense reduced", "top_n"])
def test_drafts_that_belie_logits_are_found_among_others(form):
    scene, draw = Scene(DENSE), torch.Generator().manual_seed(1)
    counts, width = (3, 1, 4), 7 if form != "dense" else VOCAB
    values = 2 * torch.randn(sum(counts), width, generator=draw)
    sent = torch.stack([torch.randperm(VOCAB, generator=draw)[:width] for _ in values]) if form == "top_n" else None
    reduced = REDUCED if form == "dense reduced" else None
    logits = AnswerLogits(values, None if sent is None else sent.int(), reduced)
    answers, first = [], 0
    for number, count in enumerate(counts):
        one = scene.decode(temperature=0.5 + number, max_tokens=1000)
        tokens = []
        for j in range(count):
            ids = reduced if sent is None else sent[first + j]
            arguments = [0.5 + number], [one.keys.proposal], [len(one.tokens) + j]
            row = values[first + j : first + j + 1]
            column = gumbel_sample(row, *map(torch.tensor, arguments), draft_offset=j, token_ids=ids)
            tokens.append(int(column if ids is None else ids[column]))
        answers.append((one, ReadyDrafts(len(one.tokens), one.tokens[-1], tokens, logits, first)))
        first += count
    assert find_belied(answers, use_fp64=False) == []
    for request, drafts in answers:
        wrong = drafts._replace(tokens=[*drafts.tokens[:-1], (drafts.tokens[-1] + 1) % VOCAB])
        others = [(request, wrong) if one is request else (one, its) for one, its in answers]
        (found,) = find_belied(others, use_fp64=False)
        assert found is wrong


def replace_last(answer: pb.Drafts) -> pb.Drafts:
    """The answer with another last draft."""
    drawn = decode_tensor(answer.tokens, "tokens", torch.int32, (K,)).tolist()
    answer.ClearField("tokens")
    encode_tensor(torch.tensor([*drawn[:-1], (drawn[-1] + 1) % VOCAB], dtype=torch.int32), answer.tokens)
    return answer


def test_drafts_at_temperature_0_are_not_drawn_again(monkeypatch):
    monkeypatch.setattr(redraws, "REDRAW_SHARE", 1)
    scene, stream, one = start(DENSE)
    for _ in range(5):
        scene.answer(stream, answer_to(stream.last, logits=torch.zeros(K, VOCAB)))
        assert one.drafts is not None
        scene.verify(one, 3)
        scene.flush()
    assert stream.failure is None


def test_drafts_keep_the_columns_of_their_head_when_it_is_gone():
    scene = Scene(DENSE)
    stream = scene.connect(draft_token_ids=REDUCED, draft_vocab_size=len(REDUCED))
    one = scene.decode()
    scene.flush()
    logits = torch.randn(K, len(REDUCED))
    scene.answer(stream, answer_to(stream.last, logits=logits))
    scene.disconnect(stream)
    scene.connect(draft_token_ids=REDUCED + 1, draft_vocab_size=len(REDUCED))
    scene.flush()
    assert torch.equal(one.drafts.logits.draft_token_ids, REDUCED)
    assert torch.equal(one.drafts.logits.values, logits)
    assert one.drafts.logits.draft_token_ids.device == CPU


@pytest.mark.parametrize(
    ("config", "logits", "text"),
    [
        (DENSE, None, "drafts.logits.dtype"),
        (DENSE, torch.zeros(K, VOCAB + 1), f"drafts.logits.shape = (3, {VOCAB + 1}): must be [3, {VOCAB}]"),
        (DENSE, torch.zeros(K, VOCAB).half(), "drafts.logits.dtype"),
        (TOP_N, torch.zeros(K, 5), "drafts.logits.shape = (3, 5): must be [3, 4]"),
        (TOP_N, torch.zeros(K, 4), "drafts.logits_token_ids.dtype"),
    ],
    ids=["missing", "wide", "half", "more than n", "without ids"],
)
def test_logits_that_are_not_those_configured_expel(config, logits, text):
    scene, stream, _ = start(config)
    scene.answer(stream, answer_to(stream.last, logits=logits))
    assert stream.is_expelled
    assert text in stream.failure


def test_an_id_twice_among_a_drafts_logits_expels():
    scene, stream, _ = start(TOP_N)
    answer = answer_to(stream.last, logits=torch.zeros(K, 4))
    ids = torch.arange(4, dtype=torch.int32).repeat(K, 1)
    ids[1, 3] = 2
    encode_tensor(ids, answer.logits_token_ids)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert "drafts.logits_token_ids = 3 rows: each id at most once in a row" in stream.failure


def test_ids_of_logits_outside_the_vocabulary_expel():
    scene, stream, _ = start(TOP_N)
    answer = answer_to(stream.last, logits=torch.zeros(K, 4))
    encode_tensor(torch.full((K, 4), VOCAB, dtype=torch.int32), answer.logits_token_ids)
    scene.answer(stream, answer)
    assert stream.is_expelled
    assert f"drafts.logits_token_ids = {VOCAB}" in stream.failure
