"""Steps that are launched before they are asked for give what other steps give, and nobody waits for them in vain.

On the CPU a stand-in holds back what a device would; the same is seen on CUDA below.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Reply, Rows, Stream, Text, connect, make_engine, make_step, opened
from served import TIMEOUT_S
from tiny_head import TinyHead

from drafter_service.draft_loop import LoopShape
from drafter_service.engine import DraftEngine
from drafter_service.engine_thread import EngineThread
from drafter_service.sampling_mode import SamplingMode
from drafter_service.session import SessionTerms
from drafter_service.step_ahead import PATIENCE_S, StepAhead

SIZES = (1, 2, 4, 8, 16, 32)
DENSE = SamplingMode(gumbel=True, dense=True)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class StandIn:
    """Graphs, and the stream that they run on: what is launched while it is held is computed at the release."""

    def __init__(self, engine: DraftEngine) -> None:
        self._loop = engine._loop
        self.is_held = False
        self.launched: list[LoopShape] = []  # and not computed yet
        self.num_ahead = 0

    def shape_for(self, mode: SamplingMode, num_sequences: int, num_rows: int, num_drafts: int) -> LoopShape:
        size = SIZES[bisect_left(SIZES, max(num_sequences, -(-num_rows // 5)))]
        return LoopShape(mode, size, 5 * size, 5, num_drafts)

    def capture(self, *_: Any) -> None:
        assert not self.is_held

    def drop_stale(self) -> None:
        assert not self.is_held

    def replay(self, shape: LoopShape) -> None:
        self.launched.append(shape)
        self.num_ahead += self.is_held
        if not self.is_held:
            self.go_on()

    def stop(self) -> None:
        assert not self.is_held
        self.is_held = True

    def release(self, fill: Callable[[], object], behind: Any = None) -> bool:
        assert behind is None
        if self.is_held:
            fill()
            self.go_on()
            return True
        return False

    def go_on(self) -> None:
        """Also what a guard does when nobody comes."""
        self.is_held = False
        while self.launched:
            self._loop.run(self.launched.pop(0))


class WatchedHead(TinyHead):
    """Nothing is launched one by one while the stream is held."""

    device: StandIn | None = None

    def forward(self, *inputs: Any) -> torch.Tensor:
        assert self.device is None or not self.device.is_held
        return super().forward(*inputs)


def make_ahead(mode: SamplingMode | None = None) -> tuple[Stream, StandIn]:
    """A stream whose engine launches steps ahead."""
    head = WatchedHead()
    engine = make_engine(head)
    head.device = device = StandIn(engine)
    engine._graphs = engine._proposer._graphs = device
    engine._proposer._ahead = StepAhead(engine._loop, device, device, torch.device("cpu"))
    return connect(engine, mode), device


def launch_ahead(stream: Stream) -> bool:
    """Whether a step waits now."""
    stream.engine.launch_ahead()
    return stream.engine.ahead_until < float("inf")


def same(given: dict[int, Reply], expected: dict[int, Reply]) -> None:
    assert given.keys() == expected.keys()
    for i, reply in expected.items():
        assert (given[i].status, given[i].tokens) == (reply.status, reply.tokens)
        if reply.logits is not None:
            torch.testing.assert_close(given[i].logits, reply.logits, rtol=1e-4, atol=1e-4)


class Pair:
    """The same steps with some of them launched ahead, and without."""

    def __init__(self, ahead: Stream, plain: Stream, count: int) -> None:
        self.streams = (ahead, plain)
        self.texts = {i: Text(i) for i in range(count)}
        self.firsts = {i: 10 + i for i in range(count)}
        rows = [Rows(i, self.texts[i], 0, self.firsts[i]) for i in range(count)]
        self.step(rows, [opened(i, 0.8, key=i) for i in range(count)])

    def step(self, rows: list[Rows], *changes: Any) -> None:
        same(*(stream.step(rows, *changes) for stream in self.streams))

    def draft(self, turn: int, ids: range, drafts: int = 4) -> None:
        """One step of some of the sequences, with changing numbers of rows."""
        rows = []
        for i in ids:
            count, wanted = (i + turn) % 5 + 1, drafts if i == ids[0] else (i + turn) % drafts + 1
            rows.append(Rows(i, self.texts[i], self.firsts[i], count, wanted))
            self.firsts[i] += count
        self.step(rows)


@pytest.mark.parametrize("mode", [SamplingMode(), SamplingMode(gumbel=True), DENSE], ids=str)
def test_drafts_of_steps_launched_ahead_are_those_of_others(mode: SamplingMode) -> None:
    stream, device = make_ahead(mode)
    pair = Pair(stream, connect(make_engine(TinyHead()), mode), 3)
    ahead = []
    for turn in range(10):
        ahead.append(launch_ahead(stream))
        assert launch_ahead(stream) == ahead[-1]  # once is enough
        pair.draft(turn, range(3))
        assert not device.is_held
    assert ahead == [False] * 2 + [True] * 8
    assert device.num_ahead == 8


def test_a_step_of_another_shape_is_computed_anew_and_then_two_alike_come_first() -> None:
    stream, device = make_ahead()
    pair = Pair(stream, connect(make_engine(TinyHead())), 6)
    ahead = []
    for turn, (ids, drafts) in enumerate(
        [(range(6), 4)] * 3 + [(range(2), 4)] * 2 + [(range(2), 3)] * 2 + [(range(1, 6), 4), (range(6), 4)] * 2
    ):
        ahead.append(launch_ahead(stream))
        pair.draft(turn, ids, drafts)
    # Five sequences have the shape of six.
    assert ahead == [False] * 2 + [True] * 2 + [False] + [True] + [False] + [True] + [False] + [True] * 2
    assert device.num_ahead == sum(ahead)


def test_rows_after_which_nothing_is_drafted_find_the_device_free() -> None:
    stream, _ = make_ahead()
    pair = Pair(stream, connect(make_engine(TinyHead())), 2)
    for turn in range(2):
        pair.draft(turn, range(2))
    assert launch_ahead(stream)
    pair.step([Rows(7, Text(7), 0, 20)], [opened(7)])
    assert not launch_ahead(stream)
    for turn in range(2):
        pair.draft(turn, range(2))
    assert launch_ahead(stream)
    # Rows that nobody waits for beside others with drafts.
    first = pair.firsts[0]
    pair.step([Rows(7, Text(7), 20, 3), Rows(0, pair.texts[0], first, 2, drafts=4)])
    pair.step([Rows(7, Text(7), 23, 2, drafts=4), Rows(0, pair.texts[0], first + 2, 2, drafts=4)])


def test_a_step_that_has_begun_by_itself_is_computed_again() -> None:
    """The stream goes on by itself when it has waited too long: with padding, which nobody's rows suffer from."""
    stream, device = make_ahead()
    pair = Pair(stream, connect(make_engine(TinyHead())), 3)
    for turn in range(9):
        if launch_ahead(stream) and turn % 2:
            device.go_on()
        pair.draft(turn, range(3))
    assert device.num_ahead == 7


def test_sessions_open_and_close_while_nothing_waits() -> None:
    stream, device = make_ahead()
    pair = Pair(stream, connect(make_engine(TinyHead())), 2)
    for change in (
        lambda: stream.engine.open_session(SessionTerms("other", DENSE, 4, 2), lambda _: None),
        lambda: stream.engine.close_session(stream.engine._sessions[-1]),
    ):
        for turn in range(2):
            pair.draft(turn, range(2))
        assert launch_ahead(stream)
        assert device.is_held
        change()
        assert not device.is_held
    pair.draft(2, range(2))


def test_features_that_cannot_be_brought_leave_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, device = make_ahead()
    pair = Pair(stream, connect(make_engine(TinyHead())), 2)
    for turn in range(2):
        pair.draft(turn, range(2))
    thread = EngineThread(stream.engine, lambda: None)
    assert launch_ahead(stream)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(stream.engine.head, "fuse", fail)
    stream.send([Rows(0, pair.texts[0], pair.firsts[0], 2, 4), Rows(1, pair.texts[1], pair.firsts[1], 2, 4)])
    thread._iterate()
    assert isinstance(stream.answers[-1], Exception)
    assert not device.is_held
    monkeypatch.undo()
    Pair(connect(stream.engine), connect(make_engine(TinyHead())), 3).draft(0, range(3))


def test_the_thread_launches_ahead_and_does_not_wait_for_ever() -> None:
    stream, device = make_ahead()
    engine = stream.engine
    thread = EngineThread(engine, lambda: None)
    answered: list[Any] = []
    is_answered = threading.Semaphore(0)
    session = engine.open_session(
        SessionTerms("test", SamplingMode(), 4, 4), lambda answer: (answered.append(answer), is_answered.release())
    )
    text = Text(1)

    def take(step_id: int) -> None:
        rows = [Rows(1, text, 0, 5, 4)] if step_id == 1 else [Rows(1, text, 2 * step_id + 1, 2, 4)]
        step = make_step(step_id, rows, [opened(1)] if step_id == 1 else [])
        thread.post(lambda: thread.submit(session, step))
        assert is_answered.acquire(timeout=TIMEOUT_S)

    def within(seconds: float, is_true: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while not is_true() and time.monotonic() < end:
            time.sleep(1e-3)
        return is_true()

    thread.start()
    for step_id in range(1, 3):
        take(step_id)
    assert within(TIMEOUT_S, lambda: device.num_ahead == 1)
    assert within(TIMEOUT_S, lambda: not device.is_held)
    time.sleep(2 * PATIENCE_S)
    assert (device.num_ahead, device.is_held) == (1, False)  # none is launched until two more have come
    for step_id in range(3, 8):
        take(step_id)
    assert within(TIMEOUT_S, lambda: device.num_ahead > 1)
    thread.stop()
    assert not device.is_held
    assert [len(answer.tokens[0]) for answer in answered] == [4] * 7


@needs_gpu
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("mode", [SamplingMode(), DENSE, SamplingMode(gumbel=True, top_n=5)], ids=str)
def test_on_a_gpu_drafts_of_steps_launched_ahead_are_those_of_others(
    mode: SamplingMode, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, plain = (connect(make_engine(TinyHead(device="cuda"), max_num_seqs=9), mode) for _ in range(2))
    monkeypatch.setattr(plain.engine._proposer, "_graphs", None)
    pair = Pair(stream, plain, count)
    ahead = []
    for turn in range(12):
        ahead.append(launch_ahead(stream))
        if ahead[-1]:
            time.sleep(0.002 * (turn % 3))
            assert not torch.cuda.current_stream().query()
        pair.draft(turn % 7, range(count))
    assert ahead == [False] * 2 + [True] * 10


@needs_gpu
def test_on_a_gpu_what_comes_instead_of_the_step_finds_the_device_free() -> None:
    stream, plain = (connect(make_engine(TinyHead(device="cuda"), max_num_seqs=9)) for _ in range(2))
    pair = Pair(stream, plain, 6)
    ahead = 0
    for turn in range(12):
        ahead += launch_ahead(stream)
        pair.draft(turn % 3, range(6) if turn % 4 < 3 else range(2))
        if turn in (5, 9):
            ahead += launch_ahead(stream)
            pair.step([Rows(20 + turn, Text(7), 0, 20)], [opened(20 + turn)])
        if turn == 10:
            engine = stream.engine
            assert launch_ahead(stream)
            engine.close_session(engine.open_session(SessionTerms("other", DENSE, 4, 2), lambda _: None))
            assert torch.cuda.current_stream().query()
    assert ahead >= 4


@needs_gpu
def test_on_a_gpu_a_step_that_has_begun_by_itself_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.stream_hold.MOST_HELD_S", 0.05)
    stream, plain = (connect(make_engine(TinyHead(device="cuda"), max_num_seqs=4)) for _ in range(2))
    pair = Pair(stream, plain, 3)
    for turn in range(6):
        if launch_ahead(stream) and turn % 2:
            time.sleep(0.4)
            assert torch.cuda.current_stream().query()
        pair.draft(turn, range(3))
