"""Early drafts: the verifier alone says what becomes of them, by a commit or by another step."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from announcing import Announcer
from harness import NO_CAPACITY, UNKNOWN, Reply, Rows, Stream, Text, connect, make_engine, opened
from tiny_head import TARGET_VOCAB, WIDTH, TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine import early_drafts
from drafter_service.engine.early_drafts import STEPS_AFTER_WASTE
from drafter_service.engine.engine import DraftEngine
from drafter_service.engine.proposer import Prepared, Proposer
from drafter_service.server.step_decoder import MAX_ANNOUNCED
from draftwire.contract.errors import InvalidArgumentError, QueueFullError
from draftwire.v1 import draft_pb2 as pb

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [
    SamplingMode(),
    SamplingMode(gumbel=True, use_fp64=True),
    SamplingMode(gumbel=True, dense=True),
    SamplingMode(gumbel=True, top_n=5),
]
IDS = range(1, 6)
TEXTS = {i: Text(i) for i in range(1, 9)}


def begin(engine: DraftEngine) -> bool:
    """Begins early drafts if the engine's thread would; whether it would."""
    deadline = time.monotonic() + (5.0 if engine.device.type == "cuda" else 0.0)
    while not (can_begin := engine.look_early()) and time.monotonic() < deadline:
        time.sleep(0.001)  # until the device has written
    if can_begin:
        engine.early.begin()
    return can_begin and engine.early.has_begun


def verified(ids: Iterable[int] = IDS, drafts: int = 4) -> list[Rows]:
    """Rows of a verify step that follows prompts of 7 + i rows."""
    return [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, drafts) for i in ids]


def prompted(engine: DraftEngine, mode: SamplingMode | None = None, ids: Iterable[int] = IDS, k: int = 4) -> Stream:
    """A session whose sequences have their prompts."""
    stream = connect(engine, mode, k=k)
    stream.step([Rows(i, TEXTS[i], 0, 7 + i) for i in ids], [opened(i, 0.7, key=i) for i in ids])
    return stream


def announcer(stream: Stream, device: str = "cpu", **options: Any) -> Announcer:
    return Announcer(stream, device=torch.device(device, 0) if device == "cuda" else torch.device(device), **options)


def assert_same(found: dict[int, Reply], expected: dict[int, Reply]) -> None:
    assert found.keys() == expected.keys()
    for i, reply in expected.items():
        assert (found[i].committed_length, found[i].last_token) == (reply.committed_length, reply.last_token)
        assert found[i].tokens == reply.tokens
        if reply.logits is not None:
            torch.testing.assert_close(found[i].logits, reply.logits, rtol=1e-4, atol=1e-4)


def without(rows: list[Rows], mode: SamplingMode | None = None, *later: list[Rows], device: str = "cpu") -> list:
    """Replies to steps that were not announced."""
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    return [stream.step(one) for one in (rows, *later)]


def counts(engine: DraftEngine) -> tuple[int, int]:
    return engine.early.num_taken, engine.early.num_wasted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_gets_the_drafts_that_were_begun_early(mode, device):
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    expected = without(verified(), mode, later, device=device)
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device)
    for number, rows in enumerate((verified(), later)):
        verifier.announce(rows)
        assert begin(stream.engine)
        found = verifier.committed()
        assert_same(found, expected[number])
        assert verifier.early() == {number + 1: [found[part.sequence_id].tokens for part in rows]}
    assert counts(stream.engine) == (2, 0)
    assert verifier.features_read == 2


@pytest.mark.parametrize("device", DEVICES)
def test_early_drafts_come_with_their_confidences(device):
    mode = SamplingMode(confidences=True)
    expected = without(verified(), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device)
    verifier.announce(verified())
    assert begin(stream.engine)
    found = verifier.committed()
    assert_same(found, expected)
    (early,) = verifier.early().values()
    results = np.array(early, np.int32).reshape(len(IDS), 4, 2)
    for reply, (tokens, bits) in zip(found.values(), results.transpose(0, 2, 1), strict=True):
        assert tokens.tolist() == reply.tokens
        assert np.array_equal(bits.copy().view(np.float32), reply.confidences)
        assert (reply.confidences > 0).all()
    assert all(np.allclose(found[i].confidences, expected[i].confidences, rtol=1e-3) for i in IDS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_before_early_drafts_begin_is_a_step(mode, device):
    expected = without(verified(), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device)
    verifier.announce(verified())
    assert_same(verifier.committed(), expected)
    assert counts(stream.engine) == (0, 0)
    assert verifier.early() == {}
    assert verifier.features_read == 1


def test_no_early_drafts_are_shown_without_room_for_all():
    """They would stand where others are looked for."""
    stream = connect(make_engine(TinyHead(), max_model_len=18))
    stream.step([Rows(i, TEXTS[i], 0, 12) for i in (1, 2)], [opened(i, 0.7, key=i) for i in (1, 2)])
    verifier = announcer(stream)
    verifier.announce([Rows(i, TEXTS[i], 12, 3, 4) for i in (1, 2)])
    assert begin(stream.engine)
    found = verifier.committed()
    assert [len(found[i].tokens) for i in (1, 2)] == [4, 4] or verifier.early() == {}
    verifier.announce([Rows(i, TEXTS[i], 15, 1, 4) for i in (1, 2)])
    assert begin(stream.engine)
    assert 2 not in verifier.early()
    found = verifier.committed()
    assert [len(found[i].tokens) for i in (1, 2)] == [3, 3]


@pytest.mark.parametrize("begins", [True, False], ids=["early", "not early"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_without_closed_sequences_drafts_the_others(mode, device, begins):
    expected = without(verified([2, 4]), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device)
    verifier.announce(verified())
    assert not begins or begin(stream.engine)
    assert_same(verifier.committed(closed=[1, 3, 5]), expected)
    assert counts(stream.engine) == (int(begins), 0)
    assert stream.session.slots.keys() == {2, 4}
    assert verifier.features_read == 1


@pytest.mark.parametrize("begins", [True, False], ids=["early", "not early"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_that_wants_fewer_drafts_gets_so_many(mode, begins):
    rows = [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, i % 4) for i in IDS]
    stream = prompted(make_engine(TinyHead()), mode)
    verifier = announcer(stream)
    verifier.announce(verified())
    assert not begins or begin(stream.engine)
    assert_same(verifier.committed([part.drafts for part in rows]), without(rows, mode)[0])
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    assert_same(stream.step(later), without(rows, mode, later)[1])
    assert counts(stream.engine) == (int(begins), 0)


def other_tokens() -> list[Rows]:
    text = Text(2)
    text.tokens = text.tokens.clone()
    text.tokens[10] = (text.tokens[10] + 1) % TARGET_VOCAB
    return [Rows(2, text, 9, 3, 4) if part.sequence_id == 2 else part for part in verified()]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(verified(), id="the same"),
        pytest.param(other_tokens(), id="other tokens"),
        pytest.param([Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS], id="fewer rows"),
        pytest.param(verified([*IDS, 6]), id="one sequence more"),
        pytest.param(verified(drafts=6), id="more drafts"),
    ],
)
def test_a_step_that_replaces_gets_its_own_drafts(rows):
    ids = [*IDS, 6]
    expected = prompted(make_engine(TinyHead()), ids=ids, k=6).step(rows)
    stream = prompted(make_engine(TinyHead()), ids=ids, k=6)
    verifier = announcer(stream, k=6)
    verifier.announce(verified())
    assert begin(stream.engine)
    assert_same(verifier.replace(rows), expected)
    assert counts(stream.engine) == (0, 1)
    assert verifier.features_read == 1


def test_dropped_drafts_leave_no_trace_in_the_next_steps():
    short = [Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS]
    later = [Rows(i, TEXTS[i], 8 + i, 3, 4) for i in IDS]
    expected = without(short, None, later)
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(stream.engine)
    assert_same(verifier.replace(short), expected[0])
    assert_same(stream.step(later), expected[1])


def test_a_step_of_other_sequences_drops_nothing():
    stream = prompted(make_engine(TinyHead()), ids=[*IDS, 6])
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(stream.engine)
    assert stream.step([Rows(6, TEXTS[6], 13, 2, 4)])[6].tokens
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (1, 0)


def test_nothing_begins_before_its_tokens_are_written():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=True)
    verifier.announce(verified())
    assert not begin(stream.engine)
    verifier.marks.write()
    assert begin(stream.engine)


def test_nothing_begins_while_a_step_waits():
    stream = prompted(make_engine(TinyHead()), ids=[*IDS, 6])
    announcer(stream).announce(verified())
    stream.send([Rows(6, TEXTS[6], 13, 2, 4)])
    assert not begin(stream.engine)


@pytest.mark.parametrize("ends", ["committed", "replaced"])
def test_a_step_that_is_over_begins_nothing(ends):
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=ends == "replaced")
    verifier.announce(verified())
    found = verifier.committed() if ends == "committed" else verifier.replace(verified())
    assert_same(found, without(verified())[0])
    if ends == "replaced":
        verifier.marks.write()
    assert not begin(stream.engine)


def test_a_commit_drops_what_was_announced_before():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce([Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS])
    assert begin(stream.engine)
    verifier.announce(verified())
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (0, 1)
    assert verifier.features_read == 2


def test_a_commit_outlives_its_early_drafts(monkeypatch):
    """They were dropped for those of a later step; its tokens and features are still there."""
    monkeypatch.setattr(early_drafts, "STALE_S", 0.0)
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier, second = announcer(stream), announcer(other)
    verifier.announce(verified())
    assert begin(engine)
    second.announce(verified())
    assert begin(engine)
    assert_same(second.committed(), without(verified())[0])
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(engine) == (1, 1)


def test_a_commit_that_takes_several_batches_is_computed_anew():
    engine = make_engine(TinyHead(), max_batch_rows=8, max_sessions=4)
    stream = prompted(engine)
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(engine)
    verifier.commit()
    found: dict[int, list[int]] = {}
    while engine.has_work:
        engine.iterate()
    drafts = stream.answers[-1].drafts
    found = dict(zip(drafts.sequence_ids, drafts.num_drafts, strict=True))
    assert found == dict.fromkeys(IDS, 4)
    expected = prompted(make_engine(TinyHead(), max_batch_rows=8, max_sessions=4)).step(verified())
    assert counts(engine) == (0, 1)
    assert list(drafts.committed_lengths) == [expected[i].committed_length for i in drafts.sequence_ids]


def test_a_sequence_that_made_room_meanwhile_is_unknown():
    engine = make_engine(TinyHead(), max_num_seqs=5)
    stream = prompted(engine)
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(engine)
    other = connect(engine)
    other.step([Rows(1, TEXTS[7], 0, 9)], [opened(1)])
    found = verifier.committed()
    assert {i for i, reply in found.items() if reply.status == UNKNOWN} == {5}
    expected = without(verified())[0]
    assert all(found[i].tokens == expected[i].tokens for i in (1, 2, 3, 4))
    assert counts(engine) == (1, 0)


def test_a_commit_that_a_newer_step_supersedes_drafts_nothing():
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(stream.engine)
    verifier.commit()
    assert_same(stream.step(later), without(verified(), None, later)[1])
    assert not any(stream.answers[-2].drafts.num_drafts)


def test_a_closed_sequence_of_no_room_is_not_answered():
    engine = make_engine(TinyHead(), max_model_len=16)
    stream = connect(engine)
    stream.step([Rows(i, TEXTS[i], 0, 14) for i in (1, 2)], [opened(1), opened(2)])
    verifier = announcer(stream)
    verifier.announce([Rows(i, TEXTS[i], 14, 4, 4) for i in (1, 2)])
    assert {i: reply.status for i, reply in verifier.committed(closed=[2]).items()} == {1: NO_CAPACITY}


# What is prepared before the tokens are written.


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """What has been prepared, of steps that were not announced too."""
    made, prepare = [], Proposer.prepare

    def noted(self: Proposer, *args: Any) -> Prepared:
        made.append(prepare(self, *args))
        return made[-1]

    monkeypatch.setattr(Proposer, "prepare", noted)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_was_prepared_once_begins_with_the_rows_drawn(mode, device, prepared, monkeypatch):
    expected = without(verified(), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device, holds=device == "cpu")
    started, start = [], Proposer.start
    monkeypatch.setattr(Proposer, "start", lambda *args: (started.append(args[1]), start(*args))[1])
    prepared.clear()
    verifier.announce(verified())
    if device == "cpu":  # else the device writes when it likes
        for _ in range(3):
            assert not begin(stream.engine)
        assert len(prepared) == 1
        verifier.marks.write()
    assert begin(stream.engine)
    assert started == prepared
    assert_same(verifier.committed(), expected)
    assert len(prepared) == stream.engine.early.num_taken == 1


def step_of_others(_: Stream, other: Stream) -> None:
    assert_same(other.step(verified([5, 3, 1])), without(verified([5, 3, 1]))[0])


def step_of_its_own(stream: Stream, _: Stream) -> None:
    assert stream.step([Rows(6, TEXTS[6], 13, 2, 4)])[6].tokens


def sequence_that_closes(stream: Stream, _: Stream) -> None:
    stream.step(closed=[6])


def sequence_that_opens(stream: Stream, _: Stream) -> None:
    stream.step([Rows(7, TEXTS[7], 0, 14, 4)], [opened(7, 0.7, key=7)])


def session_that_opens(stream: Stream, _: Stream) -> None:
    connect(stream.engine, SamplingMode(gumbel=True, dense=True))


def session_that_closes(stream: Stream, other: Stream) -> None:
    stream.engine.close_session(other.session)


def other_batch_begun(stream: Stream, other: Stream) -> None:
    second = announcer(other)
    second.announce(verified([2, 4]))
    assert begin(stream.engine)
    assert_same(second.committed(), without(verified([2, 4]))[0])


@pytest.mark.parametrize(
    "change",
    [
        *(step_of_others, step_of_its_own, sequence_that_closes, sequence_that_opens),
        *(session_that_opens, session_that_closes, other_batch_begun),
    ],
)
def test_what_comes_between_changes_no_early_drafts(change: Callable[[Stream, Stream], None], prepared):
    engine = make_engine(TinyHead())
    stream, other = prompted(engine, ids=[*IDS, 6]), prompted(engine)
    verifier = announcer(stream, holds=True)
    verifier.announce(verified())
    assert not begin(engine)
    change(stream, other)
    before, taken = len(prepared), engine.early.num_taken
    assert not begin(engine)
    assert len(prepared) == before + 1  # anew
    verifier.marks.write()
    assert begin(engine)
    assert len(prepared) == before + 1
    assert_same(verifier.committed(), without(verified())[0])
    assert engine.early.num_taken == taken + 1


@pytest.mark.parametrize("looks", [True, False])
def test_nothing_is_prepared_once_the_tokens_are_written(looks, prepared):
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier = announcer(stream, holds=True)
    verifier.announce(verified())
    if looks:
        assert not begin(engine)
    step_of_others(stream, other)
    prepared.clear()
    verifier.marks.write()
    assert begin(engine)
    assert len(prepared) == 1
    assert_same(verifier.committed(), without(verified())[0])
    assert engine.early.num_taken == 1


def test_a_prepared_step_that_is_replaced_begins_nothing():
    short = [Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS]
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=True)
    verifier.announce(verified())
    assert not begin(stream.engine)
    assert_same(verifier.replace(short), without(short)[0])
    verifier.marks.write()
    assert not begin(stream.engine)


def test_of_two_announced_steps_the_later_may_begin_first():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream, holds=True)
    parts = verified([1, 2]), verified([3, 4, 5])
    for part in parts:
        verifier.announce(part)
        assert not begin(stream.engine)
    verifier.marks.write(1)
    assert begin(stream.engine)
    verifier.marks.write(0)
    for number, part in enumerate(parts, 1):
        assert_same(verifier.committed(announced_id=number), without(part)[0])
    assert counts(stream.engine) == (1, 0)


def test_nothing_is_prepared_while_the_last_inputs_are_read(prepared, monkeypatch):
    """Those of a batch that was dropped, for which nobody waits."""
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    second = announcer(other)
    second.announce(verified([1, 2]))
    assert begin(engine)
    is_done = False
    monkeypatch.setattr(Proposer, "is_done", property(lambda _: is_done))
    second.replace(closed=[1, 2])
    verifier = announcer(stream, holds=True)
    verifier.announce(verified())
    prepared.clear()
    assert not begin(engine)
    assert prepared == []
    is_done = True
    assert not begin(engine)
    assert len(prepared) == 1
    verifier.marks.write()
    assert begin(engine)
    assert len(prepared) == 1
    assert_same(verifier.committed(), without(verified())[0])


def test_room_for_the_rows_drawn_and_no_more_is_enough():
    rows = [Rows(1, TEXTS[1], 14, 2, 4)]
    streams = [connect(make_engine(TinyHead(), max_model_len=20)) for _ in range(2)]
    for stream in streams:
        stream.step([Rows(1, TEXTS[1], 0, 14)], [opened(1)])
    verifier = announcer(streams[0], holds=True)
    verifier.announce(rows)
    assert not begin(streams[0].engine)
    verifier.marks.write()
    assert begin(streams[0].engine)
    assert_same(verifier.committed(), streams[1].step(rows))
    assert streams[0].engine.early.num_taken == 1


def test_features_at_the_end_of_the_memory_are_read():
    stream = prompted(make_engine(TinyHead()))
    num_rows = sum(part.count for part in verified())
    verifier = announcer(stream, holds=True, feature_bytes=128 + num_rows * WIDTH * 4)
    verifier.announce(verified(), num_rows=num_rows)
    assert not begin(stream.engine)
    verifier.marks.write()
    assert begin(stream.engine)
    assert_same(verifier.committed(), without(verified())[0])


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
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce([rows])
    assert not begin(stream.engine)
    assert {i: reply.status for i, reply in verifier.committed().items()} == {rows.sequence_id: UNKNOWN}
    assert_same(stream.step(verified([2, 3])), without(verified([2, 3]))[0])


def test_tokens_are_read_once():
    """The verifier may write them again while the drafter computes."""
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(stream.engine)
    verifier.scribble()
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (1, 0)


@pytest.mark.parametrize("change", ["offset", "generation"])
def test_features_past_the_shared_memory_are_refused(change):
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    if change == "generation":
        verifier.sender.begin(torch.float32, (1, 1)).announce(pb.SharedSpan())  # in no message
    with pytest.raises(InvalidArgumentError, match=f"announce.features.{change}"):
        verifier.announce(verified(), offset=(1 << 20) * (change == "offset"))
    assert_same(stream.step(verified()), without(verified())[0])


def test_a_sequence_without_room_for_its_rows_begins_nothing():
    stream = connect(make_engine(TinyHead(), max_model_len=16))
    stream.step([Rows(1, TEXTS[1], 0, 14)], [opened(1)])
    announcer(stream).announce([Rows(1, TEXTS[1], 14, 4, 4)])
    assert not begin(stream.engine)


def test_one_batch_begins_for_each_step_that_comes():
    """A verifier that announces again and again has no more computed than one that sends steps."""
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified([1]))
    assert begin(stream.engine)
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
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified([1]))
    assert begin(stream.engine)
    verifier.replace([Rows(1, TEXTS[1], 8, 1, 4)])
    first = 9
    begun = []
    for _ in range(STEPS_AFTER_WASTE + 3):
        verifier.announce([Rows(2, TEXTS[2], first, 1, 4)])
        begun.append(begin(stream.engine))
        verifier.committed()
        first += 1
    assert begun == [False] * STEPS_AFTER_WASTE + [True] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_another_sessions_step_comes_between(device):
    """What was begun keeps its drafts while the other's are computed."""
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
    stream = prompted(engine)
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(engine)
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
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified())
    assert begin(stream.engine)
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

    monkeypatch.setattr(Proposer, "take", fail)
    stream.engine.fail(RuntimeError("the device failed"))
    assert str(stream.answers[-1]) == "the device failed"


def test_a_session_that_ends_leaves_no_memory_behind():
    stream = prompted(make_engine(TinyHead()))
    verifier = announcer(stream)
    verifier.announce(verified([1]))
    assert begin(stream.engine)
    verifier.announce(verified([2]))
    features = weakref.ref(verifier.receiver)
    verifier.decoder.close()  # as the stream does
    verifier.announced.clear()
    stream.engine.close_session(stream.session)
    gc.disable()
    try:
        del verifier
        assert features() is None
    finally:
        gc.enable()
    assert not stream.engine.early.has_begun
