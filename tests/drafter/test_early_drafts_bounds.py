"""Early drafts: malformed announcements, several sessions, and the cost of unused drafts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from early_scene import (
    DEVICES,
    IDS,
    TEXTS,
    announced,
    announcer,
    assert_same,
    begin,
    begun,
    counts,
    prompted,
    verified,
    without,
)
from harness import UNKNOWN, Rows, connect, make_engine, opened
from tiny_head import TARGET_VOCAB, TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine import early_drafts
from drafter_service.engine.early_drafts import STEPS_AFTER_WASTE
from drafter_service.engine.proposer import Proposer
from drafter_service.server.step_decoder import MAX_ANNOUNCED
from draftwire.contract.errors import InvalidArgumentError, QueueFullError
from draftwire.v1 import draft_pb2 as pb


def numbers(count: int, *tokens: int) -> list[int]:
    return [count, *tokens, *[-1] * (5 - len(tokens))]


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(numbers(0), id="no rows"),
        pytest.param(numbers(-3), id="less than none"),
        pytest.param(numbers(6, 1, 2, 3, 4, 5), id="more rows than numbers"),
        pytest.param(numbers(4, 1, 2, 3, 4), id="more rows than features"),
        pytest.param(numbers(2, 1, TARGET_VOCAB), id="token beyond the vocabulary"),
        pytest.param(numbers(2, -1, 1), id="negative token"),
    ],
)
def test_tokens_that_cannot_be_begin_nothing_and_end_the_stream(written):
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce([Rows(1, TEXTS[1], 8, 2, 4)], [written], num_rows=3)
    assert not begin(stream.engine)
    with pytest.raises(InvalidArgumentError, match=r"commit.announced_id = 1: must have rows and tokens"):
        verifier.commit()
    assert_same(stream.step(verified()), without(verified())[0])


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(Rows(1, TEXTS[1], 9, 2, 4), id="gap"),
        pytest.param(Rows(1, TEXTS[1], 7, 2, 4), id="row that was there"),
        pytest.param(Rows(99, TEXTS[1], 8, 2, 4), id="unknown sequence"),
    ],
)
def test_rows_of_no_open_sequence_are_unknown(rows):
    stream, verifier = announced([rows])
    assert not begin(stream.engine)
    assert {i: reply.status for i, reply in verifier.committed().items()} == {rows.sequence_id: UNKNOWN}
    assert_same(stream.step(verified([2, 3])), without(verified([2, 3]))[0])


def test_tokens_are_read_once():
    """The verifier may overwrite the tokens while the drafter computes."""
    stream, verifier = begun()
    verifier.scribble()
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (1, 0)


@pytest.mark.parametrize("change", ["offset", "generation"])
def test_features_past_the_shared_memory_are_refused(change):
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    if change == "generation":
        verifier.sender.begin(torch.float32, (1, 1)).announce(pb.SharedSpan())  # a generation that no message announces
    with pytest.raises(InvalidArgumentError, match=f"announce.features.{change}"):
        verifier.announce(verified(), offset=(1 << 20) * (change == "offset"))
    assert_same(stream.step(verified()), without(verified())[0])


def test_a_sequence_without_room_for_its_rows_begins_nothing():
    stream = connect(make_engine(TinyHead(), max_model_len=16))
    stream.step([Rows(1, TEXTS[1], 0, 14)], [opened(1)])
    announcer(stream).announce([Rows(1, TEXTS[1], 14, 4, 4)])
    assert not begin(stream.engine)


def test_one_batch_begins_for_each_step_that_comes():
    """Repeated announcements cause no more computation than steps."""
    stream, verifier = begun(verified([1]))
    verifier.committed()
    verifier.announce(verified([2]))
    verifier.announce(verified([3]))
    assert begin(stream.engine)
    verifier.drop()
    stream.send(closed=[2])
    assert not begin(stream.engine)
    verifier.announce(verified([3]))
    assert not begin(stream.engine)


def test_after_dropped_drafts_none_begin_for_some_steps():
    stream, verifier = begun(verified([1]))
    verifier.replace([Rows(1, TEXTS[1], 8, 1, 4)])
    first = 9
    found = []
    for _ in range(STEPS_AFTER_WASTE + 3):
        verifier.announce([Rows(2, TEXTS[2], first, 1, 4)])
        found.append(begin(stream.engine))
        verifier.committed()
        first += 1
    assert found == [False] * STEPS_AFTER_WASTE + [True] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_another_sessions_step_comes_between(device):
    """Early drafts are kept while the other session's drafts are computed."""
    engine = make_engine(TinyHead(device=device))
    mode = SamplingMode(gumbel=True, dense=True)
    stream, other = prompted(engine, mode), prompted(engine, mode)
    verifier = announcer(stream, device)
    verifier.announce(verified())
    assert begin(engine)
    others = verified([5, 3, 1])
    assert_same(other.step(others), without(others, mode, device=device)[0])
    assert_same(verifier.committed(), without(verified(), mode, device=device)[0])
    assert counts(engine) == (1, 0)


def test_two_sessions_steps_come_together():
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(engine)
    other.send(verified([2, 3]))
    expected = without(verified())[0]
    assert_same(verifier.committed(), expected)
    assert engine.early.num_taken == 1
    assert other.answers[-1].drafts.sequence_ids == [2, 3]


def test_a_session_that_opens_or_captures_changes_nothing():
    engine = make_engine(TinyHead())
    _, verifier = begun(engine=engine)
    connect(engine, SamplingMode(gumbel=True, dense=True))
    assert_same(verifier.committed(), without(verified())[0])
    assert engine.early.num_taken == 1


def test_sequences_that_all_end_let_others_begin():
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier = announcer(stream)
    verifier.announce(verified([1, 2]))
    assert begin(engine)
    verifier.replace(closed=[1, 2])
    assert engine.early.num_wasted == 1
    announcer(other).announce(verified())
    assert begin(engine)


def test_a_step_that_wants_no_drafts_costs_no_more():
    stream, verifier = begun()
    verifier.replace(verified(drafts=0))
    assert not stream.engine.early.has_begun
    verifier.announce([Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS])
    assert begin(stream.engine)
    verifier.committed()
    assert counts(stream.engine) == (1, 1)


def test_what_nobody_asks_for_keeps_no_other_session_waiting(monkeypatch):
    monkeypatch.setattr(early_drafts, "STALE_S", 3600.0)
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier, second = announcer(stream), announcer(other)
    verifier.announce(verified())
    assert begin(engine)
    second.announce(verified())
    assert not begin(engine)
    monkeypatch.setattr(early_drafts, "STALE_S", 0.0)
    assert begin(engine)
    assert_same(second.committed(), without(verified())[0])
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(engine) == (1, 1)


@pytest.mark.parametrize("closed", [(), tuple(IDS)], ids=["no drafts wanted", "all closed"])
def test_a_commit_that_takes_no_drafts_lets_others_begin_at_once(monkeypatch, closed):
    monkeypatch.setattr(early_drafts, "STALE_S", 3600.0)
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier, second = announcer(stream), announcer(other)
    verifier.announce(verified())
    assert begin(engine)
    assert verifier.committed(None if closed else [0] * len(IDS), closed) == {}
    second.announce(verified())
    assert begin(engine)
    assert_same(second.committed(), without(verified())[0])
    assert counts(engine) == (1, 1)


def test_of_steps_announced_alike_the_written_one_begins():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=True)
    for _ in range(MAX_ANNOUNCED):
        verifier.announce(verified())
    verifier.marks.write()
    assert begin(stream.engine)
    assert_same(verifier.committed(), without(verified())[0])
    assert stream.engine.early.num_taken == 1


def test_no_more_steps_are_announced_than_can_come():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=True)
    for i in IDS[:MAX_ANNOUNCED]:
        verifier.announce(verified([i]))
    with pytest.raises(QueueFullError, match="4 announced steps are neither committed nor replaced"):
        verifier.announce(verified([5]))


def test_a_session_ended_by_a_failing_device_waits_for_nothing(monkeypatch):
    stream = prompted(make_engine(TinyHead()))
    announcer(stream).announce(verified())
    assert begin(stream.engine)

    def fail(*_: object) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(Proposer, "finish", fail)
    stream.engine.fail(RuntimeError("the device failed"))
    assert str(stream.answers[-1]) == "the device failed"


def test_a_session_that_ends_leaves_no_memory_behind():
    stream, verifier = begun(verified([1]))
    verifier.announce(verified([2]))
    features = weakref.ref(verifier.receiver)
    verifier.decoder.close()  # as a stream does when it ends
    verifier.announced.clear()
    stream.engine.close_session(stream.session)
    gc.disable()
    try:
        del verifier
        assert features() is None
    finally:
        gc.enable()
    assert not stream.engine.early.has_begun
