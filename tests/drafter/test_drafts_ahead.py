"""Drafts that are begun before their step: what becomes of them is the step's word alone."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from foretelling import Foreteller
from harness import Reply, Rows, Stream, Text, connect, make_engine, opened
from tiny_head import TARGET_VOCAB, WIDTH, TinyHead

from drafter_service import drafts_ahead
from drafter_service.drafts_ahead import MAX_UPCOMING, STEPS_AFTER_WASTE
from drafter_service.engine import DraftEngine
from drafter_service.proposer import Prepared, Proposer
from drafter_service.sampling_mode import SamplingMode

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
    """Has drafts begun if the engine's thread would; whether it would."""
    deadline = time.monotonic() + (5.0 if engine.device.type == "cuda" else 0.0)
    while not (can_begin := engine.look_ahead()) and time.monotonic() < deadline:
        time.sleep(0.001)  # until the device has written
    if can_begin:
        engine.ahead.begin()
    return can_begin and engine.ahead.has_begun


def verified(ids: Iterable[int] = IDS, drafts: int = 4) -> list[Rows]:
    """Rows of a verify step that follows prompts of 7 + i rows."""
    return [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, drafts) for i in ids]


def prompted(engine: DraftEngine, mode: SamplingMode | None = None, ids: Iterable[int] = IDS) -> Stream:
    """A session whose sequences have their prompts."""
    stream = connect(engine, mode)
    stream.step([Rows(i, TEXTS[i], 0, 7 + i) for i in ids], [opened(i, 0.7, key=i) for i in ids])
    return stream


def assert_same(found: dict[int, Reply], expected: dict[int, Reply]) -> None:
    assert found.keys() == expected.keys()
    for i, reply in expected.items():
        assert (found[i].committed_length, found[i].last_token) == (reply.committed_length, reply.last_token)
        assert found[i].tokens == reply.tokens
        if reply.logits is not None:
            torch.testing.assert_close(found[i].logits, reply.logits, rtol=1e-4, atol=1e-4)


def without(rows: list[Rows], mode: SamplingMode | None = None, *later: list[Rows], device: str = "cpu") -> list:
    """Replies to steps of which nothing was foretold."""
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    return [stream.step(one) for one in (rows, *later)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_gets_the_drafts_that_were_begun_for_it(mode, device):
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    expected = without(verified(), mode, later, device=device)
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    ahead = stream.engine.ahead
    teller = Foreteller(stream, device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    for number, rows in enumerate((verified(), later)):
        span = teller.foretell(rows)
        assert begin(stream.engine)
        found = stream.step(rows)
        assert_same(found, expected[number])
        assert teller.writer.has_drafts(span)
        assert teller.writer.drafts(span, (len(rows), 4)).tolist() == [found[part.sequence_id].tokens for part in rows]
    assert (ahead.num_taken, ahead.num_wasted) == (2, 0)


def test_drafts_on_the_board_end_where_fewer_are_wanted():
    rows = [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, 1 + i % 3) for i in IDS]
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    span = teller.foretell(rows)
    assert begin(stream.engine)
    found = stream.step(rows)
    numbers = teller.writer.drafts(span, (5, 3)).tolist()
    assert numbers == [found[i].tokens + [-1] * (3 - len(found[i].tokens)) for i in IDS]


def test_nothing_is_on_the_board_where_there_is_room_for_fewer_drafts_of_all():
    """They would stand where others are looked for."""
    stream = connect(make_engine(TinyHead(), max_model_len=18))
    rows = [Rows(i, TEXTS[i], 12, 3, 4) for i in (1, 2)]
    stream.step([Rows(i, TEXTS[i], 0, 12) for i in (1, 2)], [opened(i, 0.7, key=i) for i in (1, 2)])
    teller = Foreteller(stream)
    span = teller.foretell(rows)
    assert begin(stream.engine)
    found = stream.step(rows)
    assert [len(found[i].tokens) for i in (1, 2)] == [4, 4] or not teller.writer.has_drafts(span)
    rows = [Rows(i, TEXTS[i], 15, 1, 4) for i in (1, 2)]
    span = teller.foretell(rows)
    assert begin(stream.engine)
    found = stream.step(rows)
    assert [len(found[i].tokens) for i in (1, 2)] == [3, 3]
    assert not teller.writer.has_drafts(span)


def test_a_step_that_is_begun_by_its_message_writes_nothing_on_the_board():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    span = teller.foretell(verified())
    stream.step(verified())
    assert not teller.writer.has_drafts(span)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_without_some_of_the_sequences_gets_the_drafts_of_the_others(mode, device):
    left = [4, 2]
    expected = without(verified(left), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    teller = Foreteller(stream, device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    teller.foretell(verified())
    assert begin(stream.engine)
    assert_same(stream.step(verified(left), closed=[1, 3, 5]), expected)
    assert stream.engine.ahead.num_taken == 1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_that_wants_fewer_drafts_gets_so_many(mode):
    rows = [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, 1 + i % 3) for i in IDS]
    stream = prompted(make_engine(TinyHead()), mode)
    Foreteller(stream).foretell(verified())
    assert begin(stream.engine)
    assert_same(stream.step(rows), without(rows, mode)[0])
    assert stream.engine.ahead.num_taken == 1


def other_tokens() -> list[Rows]:
    text = Text(2)
    text.tokens = text.tokens.clone()
    text.tokens[10] = (text.tokens[10] + 1) % TARGET_VOCAB
    return [Rows(2, text, 9, 3, 4) if part.sequence_id == 2 else part for part in verified()]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(other_tokens(), id="other-tokens"),
        pytest.param([Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS], id="fewer-rows"),
        pytest.param(verified([*IDS, 6]), id="one-sequence-more"),
        pytest.param(verified(drafts=6), id="more-drafts"),
    ],
)
def test_a_step_that_is_another_gets_its_own_drafts(rows):
    def ready(engine: DraftEngine) -> Stream:
        stream = connect(engine, k=6)
        ids = [*IDS, 6]
        stream.step([Rows(i, TEXTS[i], 0, 7 + i) for i in ids], [opened(i, 0.7, key=i) for i in ids])
        return stream

    expected = ready(make_engine(TinyHead())).step(rows)
    stream = ready(make_engine(TinyHead()))
    Foreteller(stream, k=6).foretell(verified())
    assert begin(stream.engine)
    assert_same(stream.step(rows), expected)
    assert (stream.engine.ahead.num_taken, stream.engine.ahead.num_wasted) == (0, 1)


def test_what_was_begun_in_vain_leaves_no_trace_in_the_next_steps():
    short = [Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS]
    later = [Rows(i, TEXTS[i], 8 + i, 3, 4) for i in IDS]
    expected = without(short, None, later)
    stream = prompted(make_engine(TinyHead()))
    Foreteller(stream).foretell(verified())
    assert begin(stream.engine)
    for rows, replies in zip((short, later), expected, strict=True):
        assert_same(stream.step(rows), replies)


def test_nothing_begins_before_its_tokens_are_on_the_board():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    assert not begin(stream.engine)
    teller.held.pop()()
    assert begin(stream.engine)


def test_nothing_begins_while_a_step_waits():
    stream = prompted(make_engine(TinyHead()))
    Foreteller(stream).foretell(verified())
    stream.send(verified())
    assert not begin(stream.engine)


def test_a_step_that_comes_first_leaves_nothing_to_begin():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    assert_same(stream.step(verified()), without(verified())[0])
    teller.held.pop()()
    assert not begin(stream.engine)


# What is prepared before the tokens are there.


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """What has been prepared, of steps that were not foretold too."""
    made, prepare = [], Proposer.prepare

    def noted(self: Proposer, *args: Any) -> Prepared:
        made.append(prepare(self, *args))
        return made[-1]

    monkeypatch.setattr(Proposer, "prepare", noted)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_was_prepared_once_is_begun_with_as_few_rows_as_there_are(mode, device, prepared, monkeypatch):
    expected = without(verified(), mode, device=device)[0]
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    teller = Foreteller(stream, device=torch.device(device), holds=device == "cpu")
    started, start = [], Proposer.start
    monkeypatch.setattr(Proposer, "start", lambda *args: (started.append(args[1]), start(*args))[1])
    prepared.clear()
    teller.foretell(verified())
    if device == "cpu":  # else the device writes when it likes
        for _ in range(3):
            assert not begin(stream.engine)
        assert len(prepared) == 1
        teller.held.pop()()
    assert begin(stream.engine)
    assert started == prepared
    assert_same(stream.step(verified()), expected)
    assert len(prepared) == stream.engine.ahead.num_taken == 1


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
    Foreteller(other).foretell(verified([2, 4]))
    assert begin(stream.engine)
    assert_same(other.step(verified([2, 4])), without(verified([2, 4]))[0])


@pytest.mark.parametrize(
    "change",
    [
        *(step_of_others, step_of_its_own, sequence_that_closes, sequence_that_opens),
        *(session_that_opens, session_that_closes, other_batch_begun),
    ],
)
def test_what_comes_between_leaves_the_drafts_as_they_are(change: Callable[[Stream, Stream], None], prepared):
    engine = make_engine(TinyHead())
    stream, other = prompted(engine, ids=[*IDS, 6]), prompted(engine)
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    assert not begin(engine)
    change(stream, other)
    before, taken = len(prepared), engine.ahead.num_taken
    assert not begin(engine)
    assert len(prepared) == before + 1  # anew
    teller.held.pop()()
    assert begin(engine)
    assert len(prepared) == before + 1
    assert_same(stream.step(verified()), without(verified())[0])
    assert engine.ahead.num_taken == taken + 1


@pytest.mark.parametrize("looks", [True, False])
def test_what_comes_between_and_is_at_once_followed_by_the_tokens(looks, prepared):
    """Nothing is prepared any more when the tokens are there."""
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    if looks:
        assert not begin(engine)
    step_of_others(stream, other)
    prepared.clear()
    teller.held.pop()()
    assert begin(engine)
    assert len(prepared) == 1
    assert_same(stream.step(verified()), without(verified())[0])
    assert engine.ahead.num_taken == 1


def test_a_prepared_step_that_is_another_begins_nothing():
    short = [Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS]
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    assert not begin(stream.engine)
    assert_same(stream.step(short), without(short)[0])
    teller.held.pop()()
    assert not begin(stream.engine)


def test_of_two_prepared_steps_the_later_one_may_come_first():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    parts = verified([1, 2]), verified([3, 4, 5])
    expected = [without(part)[0] for part in parts]
    for part in parts:
        teller.foretell(part)
        assert not begin(stream.engine)
    for number in (1, 0):
        teller.held[number]()
        assert begin(stream.engine)
        assert_same(stream.step(parts[number]), expected[number])
    assert stream.engine.ahead.num_taken == 2


def test_nothing_is_prepared_while_the_device_may_read_the_last_inputs(prepared, monkeypatch):
    """Those of a batch in vain, for which nobody waits."""
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    Foreteller(other).foretell(verified([1, 2]))
    assert begin(engine)
    is_done = False
    monkeypatch.setattr(Proposer, "is_done", property(lambda _: is_done))
    other.step(closed=[1, 2])
    teller = Foreteller(stream, holds=True)
    teller.foretell(verified())
    prepared.clear()
    assert not begin(engine)
    assert prepared == []
    is_done = True
    assert not begin(engine)
    assert len(prepared) == 1
    teller.held.pop()()
    assert begin(engine)
    assert len(prepared) == 1
    assert_same(stream.step(verified()), without(verified())[0])


def test_a_sequence_with_room_for_its_rows_and_not_for_more_is_begun():
    rows = [Rows(1, TEXTS[1], 14, 2, 4)]
    streams = [connect(make_engine(TinyHead(), max_model_len=20)) for _ in range(2)]
    for stream in streams:
        stream.step([Rows(1, TEXTS[1], 0, 14)], [opened(1)])
    teller = Foreteller(streams[0], holds=True)
    teller.foretell(rows)
    assert not begin(streams[0].engine)
    teller.held.pop()()
    assert begin(streams[0].engine)
    assert_same(streams[0].step(rows), streams[1].step(rows))
    assert streams[0].engine.ahead.num_taken == 1


def test_features_at_the_end_of_the_memory_with_no_room_for_more_rows_are_begun():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True, feature_bytes=128 + sum(part.count for part in verified()) * WIDTH * 4)
    teller.foretell(verified())
    assert not begin(stream.engine)
    teller.held.pop()()
    assert begin(stream.engine)
    assert_same(stream.step(verified()), without(verified())[0])


def numbers(count: int, *tokens: int) -> list[int]:
    return [count, *tokens, *[-1] * (5 - len(tokens))]


@pytest.mark.parametrize(
    ("rows", "on_board"),
    [
        pytest.param([Rows(1, TEXTS[1], 8, 2, 4)], [numbers(0)], id="no-rows"),
        pytest.param([Rows(1, TEXTS[1], 8, 2, 4)], [numbers(-3)], id="less-than-none"),
        pytest.param([Rows(1, TEXTS[1], 8, 2, 4)], [numbers(6, 1, 2, 3, 4, 5)], id="more-rows-than-numbers"),
        pytest.param([Rows(1, TEXTS[1], 8, 2, 4)], [numbers(2, 1, TARGET_VOCAB)], id="token-beyond-the-vocabulary"),
        pytest.param([Rows(1, TEXTS[1], 8, 2, 4)], [numbers(2, -1, 1)], id="negative-token"),
        pytest.param([Rows(1, TEXTS[1], 9, 2, 4)], None, id="gap"),
        pytest.param([Rows(1, TEXTS[1], 7, 2, 4)], None, id="row-that-was-there"),
        pytest.param([Rows(99, TEXTS[1], 8, 2, 4)], None, id="unknown-sequence"),
    ],
)
def test_what_cannot_be_begins_nothing_and_harms_nobody(rows, on_board):
    stream = prompted(make_engine(TinyHead()))
    Foreteller(stream).foretell(rows, on_board)
    assert not begin(stream.engine)
    assert_same(stream.step(verified()), without(verified())[0])


def test_features_past_the_shared_memory_begin_nothing():
    stream = prompted(make_engine(TinyHead()))
    Foreteller(stream).foretell(verified(), offset=1 << 20)
    assert not begin(stream.engine)


def test_a_sequence_without_room_for_its_rows_begins_nothing():
    stream = connect(make_engine(TinyHead(), max_model_len=16))
    stream.step([Rows(1, TEXTS[1], 0, 14)], [opened(1)])
    Foreteller(stream).foretell([Rows(1, TEXTS[1], 14, 4, 4)])
    assert not begin(stream.engine)


def test_one_batch_is_begun_for_each_step_that_comes():
    """A verifier that foretells again and again has no more computed than one that sends steps."""
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    teller.foretell(verified([1]))
    assert begin(stream.engine)
    stream.step(verified([1]))
    teller.foretell(verified([2]))
    teller.foretell(verified([3]))
    assert begin(stream.engine)
    stream.send(closed=[2])
    assert not begin(stream.engine)


def test_after_a_batch_in_vain_none_is_begun_for_some_steps():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    teller.foretell(verified([1]))
    assert begin(stream.engine)
    stream.step([Rows(1, TEXTS[1], 8, 1, 4)])
    text, first = TEXTS[2], 9
    begun = []
    for _ in range(STEPS_AFTER_WASTE + 3):
        rows = [Rows(2, text, first, 1, 4)]
        teller.foretell(rows)
        begun.append(begin(stream.engine))
        stream.step(rows)
        first += 1
    assert begun == [False] * STEPS_AFTER_WASTE + [True] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_another_sessions_step_comes_between(device):
    """What was begun keeps its drafts while the other's are computed."""
    engine = make_engine(TinyHead(device=device))
    mode = SamplingMode(gumbel=True, dense=True)
    stream, other = prompted(engine, mode), prompted(engine, mode)
    teller = Foreteller(stream, device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    teller.foretell(verified())
    assert begin(engine)
    others = verified([5, 3, 1])
    assert_same(other.step(others), without(others, mode, device=device)[0])
    assert_same(stream.step(verified()), without(verified(), mode, device=device)[0])
    assert (engine.ahead.num_taken, engine.ahead.num_wasted) == (1, 0)


def test_two_sessions_steps_come_together():
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    Foreteller(stream).foretell(verified())
    assert begin(engine)
    other.send(verified([2, 3]))
    expected = without(verified())[0]
    assert_same(stream.step(verified()), expected)
    assert engine.ahead.num_taken == 1
    assert other.answers[-1].drafts.sequence_ids == [2, 3]


def test_a_session_that_opens_or_captures_meanwhile_changes_nothing():
    engine = make_engine(TinyHead())
    stream = prompted(engine)
    Foreteller(stream).foretell(verified())
    assert begin(engine)
    connect(engine, SamplingMode(gumbel=True, dense=True))
    assert_same(stream.step(verified()), without(verified())[0])
    assert engine.ahead.num_taken == 1


def test_sequences_that_all_end_let_others_begin():
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    Foreteller(stream).foretell(verified([1, 2]))
    assert begin(engine)
    stream.step(closed=[1, 2])
    assert engine.ahead.num_wasted == 1
    Foreteller(other).foretell(verified())
    assert begin(engine)


def test_a_step_that_wants_no_drafts_gives_up_what_was_begun_and_costs_no_more():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    teller.foretell(verified())
    assert begin(stream.engine)
    stream.step(verified(drafts=0))
    assert not stream.engine.ahead.has_begun
    rows = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    teller.foretell(rows)
    assert begin(stream.engine)
    stream.step(rows)
    assert (stream.engine.ahead.num_taken, stream.engine.ahead.num_wasted) == (1, 1)


def test_what_nobody_asks_for_keeps_no_other_session_from_its_own(monkeypatch):
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    Foreteller(stream).foretell(verified())
    assert begin(engine)
    Foreteller(other).foretell(verified())
    assert not begin(engine)
    monkeypatch.setattr(drafts_ahead, "STALE_S", 0.0)
    assert begin(engine)
    assert_same(other.step(verified()), without(verified())[0])
    assert_same(stream.step(verified()), without(verified())[0])
    assert (engine.ahead.num_taken, engine.ahead.num_wasted) == (1, 1)


def test_of_steps_foretold_alike_the_one_that_is_written_is_begun():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    for _ in range(MAX_UPCOMING + 1):
        teller.foretell(verified())
    teller.held[-1]()
    assert begin(stream.engine)
    assert_same(stream.step(verified()), without(verified())[0])
    assert stream.engine.ahead.num_taken == 1


def test_a_session_that_ends_by_a_device_that_fails_waits_for_nothing(monkeypatch):
    stream = prompted(make_engine(TinyHead()))
    Foreteller(stream).foretell(verified())
    assert begin(stream.engine)

    def fail(*_: object) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(Proposer, "take", fail)
    stream.engine.fail(RuntimeError("the device failed"))
    assert str(stream.answers[-1]) == "the device failed"


def test_no_more_steps_are_kept_than_can_come():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream, holds=True)
    for i in IDS:
        teller.foretell(verified([i]))
    assert len(IDS) == MAX_UPCOMING + 1
    teller.held[0]()
    assert not begin(stream.engine)  # the first one is not kept
    teller.held[1]()


def test_a_session_that_ends_leaves_no_memory_behind():
    stream = prompted(make_engine(TinyHead()))
    teller = Foreteller(stream)
    teller.foretell(verified([1]))
    assert begin(stream.engine)
    teller.foretell(verified([2]))
    board = weakref.ref(teller.reader)
    stream.engine.close_session(stream.session)
    gc.disable()
    try:
        del teller.writer  # which holds it for ever
        del teller
        assert board() is None
    finally:
        gc.enable()
    assert not stream.engine.ahead.has_begun
