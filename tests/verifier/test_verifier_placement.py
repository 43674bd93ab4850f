"""Choice of the drafter of each sequence, and the features that the drafter gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_scene import start
from drafting_scene import (
    WIDTH,
    K,
    RecordedStream,
    Scene,
    answer_to,
    refusal_of,
    rows_of,
)

from draftwire.model.fusion import FeatureFusion
from draftwire.model.tensors import decode_tensor
from draftwire.v1 import draft_pb2 as pb
from verifier_service.drafters import placement
from verifier_service.drafters.features import FeatureKind
from verifier_service.drafters.stream import Loaded


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
        (loads(7), loads(2), (100, 100), 1),  # other verifiers' sequences count
        (loads(7), loads(2), (100, 10), 0),  # relative to max_sequences
        (loads(2, 0.9), loads(7, 0.1), (100, 100), 1),  # the KV cache usage counts if it is the larger share
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
    answer.load.sequences = 2  # this verifier's
    scene.answer(first, answer)
    for _ in range(3):  # two to the first, which then has 4, and one to the second
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
    """Return a head that fuses a row into two equal states, `factor` times the sum of its features."""
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


def test_a_rejected_sequence_goes_to_another_drafter_at_once(clock):
    """A drafter that reports no load and rejects every sequence does not keep sequences from other drafters."""
    scene, stream, _ = start()
    other = scene.connect()
    other.address = "drafter:2"
    scene.drafting.handle(Loaded(other, loads(50)))
    scene.answer(stream, refusal_of(stream.last, pb.SEQUENCE_STATUS_NO_CAPACITY))
    scene.flush()
    assert (len(stream.steps), rows_of(other.last)) == (1, [(1, 0, 4)])
    scene.answer(other, refusal_of(other.last, pb.SEQUENCE_STATUS_NO_CAPACITY))
    scene.flush()
    assert (len(stream.steps), len(other.steps)) == (1, 1)  # both have rejected the sequence
    clock.now += 1.01 * placement.REOPEN_DELAY_S[0]
    scene.flush()
    assert (len(stream.steps), len(other.steps)) == (2, 1)


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
