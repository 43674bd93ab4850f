"""What a drafter is told of a step before its tokens are known on the host, beside what it is sent then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting_scene import CPU, VOCAB, K, Scene, rows_of, tokens_of

from draftwire.carriers import DrafterBoard, SegmentError, TensorSender, VerifierBoard, board_bytes
from draftwire.carriers.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ScheduledRows
from verifier_service.draft_answer import read_board
from verifier_service.features_ahead import Foretold
from verifier_service.pacing import Plan
from verifier_service.request import ReadyDrafts, Request

DRAFTS = [5, 6, 7]


class Told:
    """Requests with drafts at a drafter of this host, and what that is foretold.

    Attributes
    ----------
    foretold
        Messages, oldest first.
    """

    def __init__(self, num_requests: int = 3, **head: Any) -> None:
        self.scene = Scene()
        self.stream: Any = self.scene.connect(**head)
        board = HostSegment.unshared(board_bytes(num_requests, K), CPU)
        self.stream.board, self.board = VerifierBoard(board, CPU), DrafterBoard(board, CPU)
        self.stream.sender = TensorSender(CPU, HostSegment.unshared(1 << 16, CPU))
        self.stream.lane, self.stream._last_answered, self.stream._last_queued = object(), 0, 0
        self.foretold: list[pb.UpcomingStep] = []
        self.stream.foretell = self.foretold.append
        self.requests = [self.scene.decode(3 + i) for i in range(num_requests)]
        self.scene.flush()
        self.scene.answer(self.stream)

    def launch(self, drawn: Sequence[Sequence[int]]) -> None:
        """A step that verifies the drafts of all requests, and draws so many tokens of each."""
        works = []
        for request in self.requests:
            drafts = ReadyDrafts(len(request.tokens), request.tokens[-1], DRAFTS)
            tokens = [request.tokens[-1], *DRAFTS]
            works.append(ScheduledRows(request, len(request.tokens) - 1, tokens, drafts, samples=True))
        packed = [[len(own), *own, *[-1] * (K + 1 - len(own))] for own in drawn]
        begun = self.scene.drafting.begin_features(works, torch.tensor(packed), self.scene.stores)
        self.scene.drafting.take_ahead(begun)

    def land(self, drawn: Sequence[Sequence[int]], ended: Sequence[Request] = ()) -> pb.DraftStep:
        """It lands; the message that the drafter is sent then."""
        for request, tokens in zip(self.requests, drawn, strict=True):
            self.scene.verify(request, *tokens)
        for request in ended:
            self.scene.end(request)
        self.scene.flush()
        return self.stream.last

    @property
    def session(self) -> Any:
        return self.scene.drafting._sessions[self.stream]


def test_a_step_is_foretold_as_it_is_sent():
    told = Told()
    drawn = [[5, 9], [5, 6, 7, 2], [8]]
    told.launch(drawn)
    (upcoming,) = told.foretold
    assert told.board.is_written(upcoming.drawn.generation, upcoming.drawn.offset)
    numbers = told.board.read(upcoming.drawn.offset, (3, upcoming.columns)).tolist()
    step = told.land(drawn)
    counts = [row[0] for row in numbers]
    assert list(zip(upcoming.sequence_ids, upcoming.first_rows, counts, strict=True)) == rows_of(step)
    assert [token for row in numbers for token in row[1 : 1 + row[0]]] == tokens_of(step)
    assert upcoming.features_offset == step.features.span.offset
    assert list(upcoming.num_drafts) == list(step.num_drafts) == [K] * 3


def awaited_drafts(told: Told, drafts: torch.Tensor) -> Any:
    """Tokens that are read from the board where a drafter has put its drafts after the only step that was foretold."""
    (upcoming,) = told.foretold
    awaited = told.scene.drafting.gate.awaited_answer()
    assert awaited.foretold == Foretold(upcoming.drawn, K)
    assert not told.stream.board.has_drafts(upcoming.drawn)
    told.board.answer(upcoming.drawn.generation, upcoming.drawn.offset, drafts)
    assert told.stream.board.has_drafts(upcoming.drawn)
    return read_board(told.stream.board, awaited, VOCAB)


def test_drafts_of_a_step_that_was_sent_as_it_was_foretold_are_read_from_the_board():
    told = Told()
    drawn = [[5, 9], [5, 6, 7, 2], [8]]
    told.launch(drawn)
    told.land(drawn)
    drafts = torch.arange(3 * K, dtype=torch.int32).view(3, K)
    assert awaited_drafts(told, drafts).tolist() == list(range(3 * K))


@pytest.mark.parametrize("num_drafts", [1, K - 1])
def test_fewer_drafts_than_were_foretold_are_the_first_ones_of_each_sequence(num_drafts):
    told = Told()
    told.launch([[5], [5, 6], [5]])
    told.session.pace.governor.plan = Plan(num_drafts)
    told.land([[5], [5, 6], [5]])
    drafts = torch.arange(3 * K, dtype=torch.int32).view(3, K)
    assert awaited_drafts(told, drafts).tolist() == drafts[:, :num_drafts].flatten().tolist()


def test_more_drafts_than_were_foretold_are_not_read_from_the_board():
    told = Told()
    told.session.pace.governor.plan = Plan(K - 1)
    told.launch([[5], [5], [5]])
    told.session.pace.governor.plan = Plan(K)
    told.land([[5], [5], [5]])
    awaited = told.scene.drafting.gate.awaited_answer()
    assert awaited.num_drafts == [K] * 3
    assert awaited.foretold is None


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_what_is_no_token_on_the_board_begins_nothing(wrong):
    told = Told()
    told.launch([[5], [5], [5]])
    told.land([[5], [5], [5]])
    drafts = torch.zeros(3, K, dtype=torch.int32)
    drafts[1, 2] = wrong
    assert awaited_drafts(told, drafts) is None


def test_drafts_that_come_after_another_step_than_was_foretold_are_not_read_from_the_board():
    told = Told()
    told.launch([[5], [5], [5]])
    told.land([[5], [5], [5]], ended=told.requests[:1])
    assert told.scene.drafting.gate.awaited_answer().foretold is None
    told.scene.answer(told.stream)
    told.requests = told.requests[1:]
    told.foretold.clear()
    told.launch([[5], [5]])
    told.land([[5], [5]])
    assert told.scene.drafting.gate.awaited_answer().foretold.drawn == told.foretold[0].drawn
    told.scene.answer(told.stream)
    told.stream.board, board = None, told.stream.board
    told.launch([[6], [6]])
    told.land([[6], [6]])  # is not foretold
    assert told.scene.drafting.gate.awaited_answer().foretold is None
    told.stream.board = board


def test_numbers_are_those_of_the_drafters_sequences_wherever_the_draw_has_them():
    told = Told()
    told.requests.reverse()  # the step's, and not the session's
    told.requests.insert(1, told.scene.decode(4))  # which the drafter has no place of yet
    told.launch([[8], [1, 2], [5, 6, 7, 2], [5, 9]])
    (upcoming,) = told.foretold
    numbers = told.board.read(upcoming.drawn.offset, (3, upcoming.columns)).tolist()
    assert numbers == [[2, 5, 9, -1, -1], [4, 5, 6, 7, 2], [1, 8, -1, -1, -1]]


def test_who_is_foretold_is_marked_until_the_draw_is_committed():
    told = Told()
    assert not any(request.is_foretold for request in told.requests)
    told.launch([[5], [5], [5]])
    assert all(request.is_foretold for request in told.requests)
    silent = Told()
    silent.stream.foretell = lambda _: None  # the lane is full: what is on the board can be seen all the same
    silent.launch([[5], [5], [5]])
    assert all(request.is_foretold for request in silent.requests)
    unmarked = Told()
    unmarked.stream.board = None
    unmarked.launch([[5], [5], [5]])
    assert not any(request.is_foretold for request in unmarked.requests)


def test_features_that_were_foretold_and_not_sent_are_kept_until_the_drafter_has_answered():
    """It may read them until then."""
    told = Told()
    drawn = [[5, 9], [5], [8]]
    told.launch(drawn)
    step = told.land(drawn, ended=told.requests[:1])
    assert list(step.sequence_ids) == list(told.foretold[0].sequence_ids)[1:]
    assert step.features.span.offset != told.foretold[0].features_offset
    ((step_id, features),) = told.session.unsent
    assert step_id == step.step_id
    assert not features._shared[2].is_given_up
    told.scene.answer(told.stream)
    assert not told.session.unsent
    assert features._shared[2].is_given_up


def test_a_drafter_that_goes_gives_all_of_it_back():
    told = Told()
    told.launch([[5], [5], [5]])
    told.land([[5], [5], [5]], ended=told.requests[:1])
    ((_, features),) = told.session.unsent
    told.scene.disconnect(told.stream)
    assert features._shared[2].is_given_up


@pytest.mark.parametrize("case", ["as it was foretold", "one has ended", "all have ended", "no drafts are wanted"])
def test_what_waits_for_drafts_in_vain_tells_nothing_of_the_link(case):
    told = Told()
    told.launch([[5], [5], [5]])
    if case == "no drafts are wanted":
        told.session.pace.skip_drafts()
    told.land([[5], [5], [5]], ended=told.requests[: {"one has ended": 1, "all have ended": 3}.get(case, 0)])
    (message,) = told.session.unanswered.values()
    assert message.is_behind == (case != "as it was foretold")
    link = told.session.pace.cost.link
    told.session.pace.take_answer(message, message.sent + 60.0, 1e-3, is_beside=False)
    assert (told.session.pace.cost.link == link) == message.is_behind


def test_nothing_of_a_drafter_that_has_gone_waits_for_a_collector():
    """Python looks for cycles seldom, and the memory that is shared goes with the session."""
    told = Told()
    told.launch([[5], [5], [5]])
    told.land([[5], [5], [5]])
    assert told.session.foretold is not None
    told.scene.answer(told.stream)
    assert told.session.foretold is None
    told.launch([[5], [5], [5]])
    told.land([[5], [5], [5]])
    assert told.session.foretold is not None
    session = weakref.ref(told.session)
    gc.collect()
    gc.disable()
    try:
        told.scene.disconnect(told.stream)
        assert session() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["no-board", "features-in-the-message", "no-drafts", "behind-the-stream", "late"])
def test_nothing_is_foretold_that_the_drafter_could_not_begin(why):
    told = Told()
    if why == "no-board":
        told.stream.board = None
    elif why == "features-in-the-message":
        told.stream.sender = TensorSender(CPU)
    elif why == "no-drafts":
        told.session.pace.governor.plan = Plan(0)
    elif why == "behind-the-stream":
        told.stream._last_queued = 5
    else:
        told.session.is_late = True
    told.launch([[5], [5], [5]])
    assert told.foretold == []


def test_a_device_that_cannot_write_the_board_goes_on_without(monkeypatch, caplog):
    told = Told()

    def fail(*_: object) -> None:
        raise SegmentError("cuStreamWriteValue32_v2: not supported (CUDA error 801)")

    monkeypatch.setattr(told.stream.board, "post", fail)
    told.launch([[5], [5], [5]])
    assert (told.foretold, told.stream.board) == ([], None)
    assert "not foretold any more: cuStreamWriteValue32_v2" in caplog.text
    assert rows_of(told.land([[5], [5], [5]]))
