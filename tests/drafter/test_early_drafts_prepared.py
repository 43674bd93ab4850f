"""The preparation of an announced step before its tokens are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from early_scene import DEVICES, IDS, MODES, TEXTS, announcer, assert_same, begin, counts, prompted, verified, without
from harness import Rows, Stream, connect, make_engine, opened
from tiny_head import WIDTH, TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine.proposer import Prepared, Proposer


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """The inputs prepared so far, including those of steps that were not announced."""
    made, prepare = [], Proposer.prepare

    def note(self: Proposer, *args: Any) -> Prepared:
        made.append(prepare(self, *args))
        return made[-1]

    monkeypatch.setattr(Proposer, "prepare", note)
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
    if device == "cpu":  # a GPU writes the tokens at any time
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
    assert len(prepared) == before + 1  # prepared again
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
    """The device may still read the inputs of a dropped batch, for which no step waits."""
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
