"""Announcing a step to a drafter before the host has the step's tokens, and committing it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting_scene import CPU, VOCAB, K, Scene, make_head, refusal_of, rows_of, tokens_of
from rings import channel_ends

from draftwire.model.tensors import encode_floats, encode_ids
from draftwire.transport import Body, SegmentError, TensorReceiver, TensorSender
from draftwire.transport.host_segment import HostSegment
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.session import MAX_ANNOUNCED
from verifier_service.drafters.stream import Answered, Stream

DRAFTS = [5, 6, 7]
EARLY = torch.arange(3 * K, dtype=torch.int32).view(3, K)
"""Early drafts of three sequences."""


class LocalDrafting:
    """Requests with drafts at a drafter on the same host, and the messages to that drafter.

    Attributes
    ----------
    announced
        Messages that announce steps, with their bodies; oldest first.
    steps
        Steps and commits, oldest first.
    """

    def __init__(
        self,
        num_requests: int = 3,
        *,
        shares_features: bool = True,
        write_value: Any = None,
        confidences: bool = False,
    ) -> None:
        self.scene = Scene()
        self.announced: list[tuple[pb.Announce, Body]] = []
        self.steps: list[Any] = []
        channel, self.drafter = channel_ends(write_value=write_value)
        status = generate_pb2.DrafterStatus(address="drafter:1")
        sender = TensorSender(CPU, HostSegment.unshared(1 << 16, CPU) if shares_features else None)
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda call, *args: call(*args))
        head = make_head(confidences=confidences)
        self.stream = Stream(
            *(status, head, lambda: None, sender, TensorReceiver(CPU), lambda *_: None, Traffic(), channel),
            loop=loop,
        )
        self.scene.connect_stream(self.stream)
        self.requests = [self.scene.decode(3 + i) for i in range(num_requests)]
        self.scene.flush()
        if shares_features:
            self.answer(self.read())

    def read(self) -> Any:
        """Receive the drafter's messages; return the last step or commit."""
        for record in self.drafter.receive():
            request = pb.DraftRequest.FromString(record.message)
            if request.WhichOneof("message") == "announce":
                assert record.body is not None
                self.announced.append((request.announce, record.body))
            else:
                self.steps.append(request.commit if request.WhichOneof("message") == "commit" else request.step)
        return self.steps[-1] if self.steps else None

    def launch(self, drawn: Sequence[Sequence[int]]) -> Any:
        """Launch a step with drafts of all requests that samples the tokens `drawn`; return its early features."""
        works = []
        for request in self.requests:
            drafts = ReadyDrafts(len(request.tokens), request.tokens[-1], DRAFTS)
            tokens = [request.tokens[-1], *DRAFTS]
            works.append(ScheduledRows(request, len(request.tokens) - 1, tokens, drafts, samples=True))
        packed = [[len(own), *own, *[-1] * (K + 1 - len(own))] for own in drawn]
        early = self.scene.drafting.announce(works, torch.tensor(packed), self.scene.stores)
        self.read()
        return early

    def land(self, drawn: Sequence[Sequence[int]], early: Any, ended: Sequence[Request] = ()) -> Any:
        """Commit the launched step, and end the requests `ended`; return the message to the drafter."""
        self.scene.drafting.commit(early)
        for request, tokens in zip(self.requests, drawn, strict=True):
            self.scene.verify(request, *tokens)
        for request in list(ended):
            self.scene.end(request)
            self.requests.remove(request)
        self.scene.flush()
        return self.read()

    def step(self, drawn: Sequence[Sequence[int]], ended: Sequence[Request] = ()) -> Any:
        """Launch and commit a step; return the message to the drafter."""
        return self.land(drawn, self.launch(drawn), ended)

    def answer(self, step: Any) -> None:
        """Answer a step with K drafts for each request."""
        bindings = self.session.bindings
        requests = [one.request for one in bindings]
        drafts = pb.Drafts(
            step_id=step.step_id,
            sequence_ids=[one.sequence_id for one in bindings],
            statuses=[pb.SEQUENCE_STATUS_OK] * len(requests),
            committed_lengths=[len(one.tokens) for one in requests],
            last_tokens=[one.tokens[-1] for one in requests],
            num_drafts=[K] * len(requests),
        )
        encode_ids(DRAFTS * len(requests), drafts.tokens)
        encode_floats(np.full(K * len(requests), 0.5), drafts.confidences)
        self.scene.drafting.handle(Answered(self.stream, drafts))

    def show(self, drafts: torch.Tensor, announced_id: int) -> None:
        """Send early drafts from the drafter."""
        response = pb.DraftResponse(early=pb.EarlyDrafts(announced_id=announced_id))
        assert self.drafter.send(response.SerializeToString(), drafts)
        assert self.stream.read_direct() == []

    @property
    def session(self) -> Any:
        return self.scene.drafting.sessions[self.stream]

    @property
    def awaited(self) -> Any:
        """Return the answer that the next step waits for."""
        return self.scene.drafting.wait_policy.awaited_answer()


@pytest.fixture
def local() -> LocalDrafting:
    return LocalDrafting()


def test_a_step_is_announced_and_committed_as_it_is(local):
    drawn = [[5, 9], [5, 6, 7, 2], [8]]
    early = local.launch(drawn)
    ((announced, body),) = local.announced
    opened = [*rows_of(local.steps[0]), *rows_of(local.steps[1])]  # the prompt of 5 rows has a separate message
    assert list(announced.sequence_ids) == [sequence_id for sequence_id, _, _ in opened]
    assert list(announced.first_rows) == [first + rows for _, first, rows in opened]
    assert (announced.announced_id, announced.num_drafts, announced.num_rows) == (1, K, 3 * (K + 1))
    assert announced.features.generation == 3  # 1 and 2 are the features of the prompts
    commit = local.land(drawn, early)
    assert commit == pb.Commit(step_id=3, announced_id=1, num_drafts=[K] * 3)
    assert body.is_written
    assert body.num_numbers == 3 * announced.columns
    numbers = body.read((3, announced.columns)).tolist()
    assert [row[1 : 1 + row[0]] for row in numbers] == drawn
    assert [request.tokens[-len(own) :] for request, own in zip(local.requests, drawn, strict=True)] == drawn


def awaited_drafts(local: LocalDrafting, drafts: torch.Tensor) -> Any:
    """Send early drafts for the last announced step; return those that the verifier reads, None if it drops them."""
    awaited = local.awaited
    assert not awaited.has_early_drafts()
    local.show(drafts, local.announced[-1][0].announced_id)
    assert awaited.has_early_drafts()
    found = awaited.read_early_drafts(VOCAB)
    assert not awaited.has_early_drafts()  # early drafts are read once
    assert found is None or (found.confidences is not None) == local.stream.head.confidences
    return None if found is None else found.tokens


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_early_drafts_that_are_no_tokens_begin_nothing(local, wrong):
    local.step([[5]] * 3)
    drafts = EARLY.clone()
    drafts[1, 2] = wrong
    assert awaited_drafts(local, drafts) is None


@pytest.mark.parametrize(("announced_id", "num_sequences"), [(1, 3), (2, 2)])
def test_early_drafts_of_another_step_or_number_are_not_read(local, announced_id, num_sequences):
    local.answer(local.step([[5]] * 3))
    local.step([[6]] * 3)
    local.show(EARLY[:num_sequences], announced_id)
    assert not local.awaited.has_early_drafts()


@pytest.mark.parametrize(("announced_id", "has_body"), [(0, True), (2, True), (1, False)])
def test_early_drafts_of_no_announced_step_expel_the_drafter(local, announced_id, has_body):
    local.step([[5]] * 3)
    response = pb.DraftResponse(early=pb.EarlyDrafts(announced_id=announced_id))
    assert local.drafter.send(response.SerializeToString(), EARLY if has_body else None)
    assert local.stream.read_direct() is None
    assert local.stream.is_expelled
    assert "early.announced_id" in local.stream.failure


def test_early_drafts_without_end_expel_the_drafter(local):
    """Each message costs engine time, and early drafts do not count as an answer."""
    local.answer(local.step([[5]] * 3))
    local.step([[6]] * 3)
    for announced_id in (1, 2):
        local.show(EARLY, announced_id)
    response = pb.DraftResponse(early=pb.EarlyDrafts(announced_id=2))
    assert local.drafter.send(response.SerializeToString(), EARLY)
    assert local.stream.read_direct() is None
    assert local.stream.is_expelled
    assert "early.announced_id = 2: allowed range [3, 2]" in local.stream.failure


def test_early_drafts_leave_the_ring_when_their_step_is_answered(local):
    """Later answers have room in the ring, though no more early drafts arrive."""
    step = local.step([[5]] * 3)
    local.show(EARLY, 1)
    local.answer(step)
    for step_id in range(4, 104):
        local.stream.send(pb.DraftStep(step_id=step_id))
        local.read()
        answer = pb.DraftResponse(drafts=pb.Drafts(step_id=step_id, sequence_ids=range(500)))
        assert local.drafter.send(answer.SerializeToString())
        assert [event.drafts.step_id for event in local.stream.read_direct()] == [step_id]


def test_early_drafts_of_a_committed_step_are_read(local):
    local.step([[5, 9], [5, 6, 7, 2], [8]])
    assert awaited_drafts(local, EARLY).tolist() == list(range(3 * K))


def test_early_drafts_bring_their_confidences():
    local = LocalDrafting(confidences=True)
    local.step([[5, 9], [5, 6, 7, 2], [8]])
    confidences = torch.linspace(0.0, 1.0, 3 * K).view(3, K)
    drafts = torch.stack([EARLY, confidences.view(torch.int32)], dim=-1)
    awaited = local.awaited
    local.show(drafts, 1)
    found = awaited.read_early_drafts(VOCAB)
    assert found.tokens.tolist() == list(range(3 * K))
    assert found.confidences.tolist() == confidences.flatten().tolist()


@pytest.mark.parametrize("num_drafts", [1, K - 1])
def test_fewer_early_drafts_are_the_first_of_each_sequence(local, num_drafts):
    early = local.launch([[5], [5, 6], [5]])
    local.session.pace.policy.pin(num_drafts)
    commit = local.land([[5], [5, 6], [5]], early)
    assert list(commit.num_drafts) == [num_drafts] * 3
    assert awaited_drafts(local, EARLY).tolist() == EARLY[:, :num_drafts].flatten().tolist()


def test_early_drafts_of_closed_sequences_are_not_read(local):
    commit = local.step([[5], [5, 6], [5]], ended=[local.requests[1]])
    assert (list(commit.closed_ids), list(commit.num_drafts)) == ([2], [K] * 2)
    assert awaited_drafts(local, EARLY).tolist() == EARLY[[0, 2]].flatten().tolist()


def test_a_sequence_that_the_drafter_has_lost_is_closed(local):
    step = local.step([[5]] * 3)
    early = local.launch([[6]] * 3)
    lost = refusal_of(pb.DraftStep(step_id=step.step_id, sequence_ids=[2]), pb.SEQUENCE_STATUS_UNKNOWN)
    local.scene.drafting.handle(Answered(local.stream, lost))
    commit = local.land([[6]] * 3, early)
    assert (list(commit.closed_ids), list(commit.num_drafts)) == ([2], [K] * 2)


def test_a_request_near_its_end_wants_fewer_drafts(local):
    local.requests[1].max_length = len(local.requests[1].tokens) + 2
    local.requests[2].max_length = len(local.requests[2].tokens) + 3
    commit = local.step([[5]] * 3)
    assert list(commit.num_drafts) == [K, 0, 1]
    assert awaited_drafts(local, EARLY).tolist() == [*range(K), 2 * K]


def more_drafts(local: LocalDrafting) -> None:
    local.session.pace.policy.pin(K)


def no_drafts(local: LocalDrafting) -> None:
    """Send rows without requesting drafts, as in steps that measure throughput without drafts."""
    local.session.pace.policy = SimpleNamespace(num_drafts=0, is_off=False, is_adaptive=True)


def request_joins(local: LocalDrafting) -> None:
    local.scene.decode(3)


def all_end(local: LocalDrafting) -> None:
    for request in local.requests:
        local.scene.end(request)


@pytest.mark.parametrize("change", [more_drafts, no_drafts, request_joins, all_end])
def test_a_step_that_has_changed_replaces_the_announced_one(local, change):
    local.session.pace.policy.pin(K - 1)
    early = local.launch([[5]] * 3)
    local.scene.drafting.commit(early)
    for request in local.requests:
        local.scene.verify(request, 5)
    change(local)
    local.scene.flush()
    step = local.read()
    assert isinstance(step, pb.DraftStep)
    announced, _ = local.announced[0]
    assert step.replaces == announced.announced_id
    assert not step.HasField("features") or step.features.span.offset != announced.features.offset
    if local.scene.requests:
        assert tokens_of(step)[:3] == [5] * 3
    awaited = local.awaited
    assert awaited is None or not awaited.has_early_drafts()


def test_what_a_once_off_drafter_is_sent_replaces_the_announced(local):
    early = local.launch([[5]] * 3)
    local.session.pace.policy.pin(0)
    num_sent = len(local.steps)
    local.land([[5]] * 3, early)
    assert len(local.steps) == num_sent
    local.session.pace.policy.pin(K)
    local.scene.flush()
    step = local.read()
    assert len(local.steps) == num_sent + 1
    assert step.replaces == 1
    assert tokens_of(step) == [5] * 3


def test_steps_that_were_not_announced_follow(local):
    local.answer(local.step([[5]] * 3))
    local.session.pace.policy.pin(0)
    early = local.launch([[6]] * 3)
    local.session.pace.policy.pin(K)
    step = local.land([[6]] * 3, early)
    assert isinstance(step, pb.DraftStep)
    assert tokens_of(step) == [6] * 3
    assert not local.awaited.has_early_drafts()
    local.answer(step)
    assert local.step([[7]] * 3).announced_id == 2


def test_numbers_are_the_sequences_wherever_they_are_drawn(local):
    local.requests.reverse()  # the order of the step, not of the session
    local.requests.insert(1, local.scene.decode(4))  # has no place at the drafter yet
    local.launch([[8], [1, 2], [5, 6, 7, 2], [5, 9]])
    ((announced, body),) = local.announced
    numbers = body.read((3, announced.columns)).tolist()
    assert numbers == [[2, 5, 9, -1, -1], [4, 5, 6, 7, 2], [1, 8, -1, -1, -1]]


def test_announced_requests_are_marked(local):
    """Announced requests are neither preempted nor continued before the step is committed."""
    assert not any(request.is_announced for request in local.requests)
    local.launch([[5]] * 3)
    assert all(request.is_announced for request in local.requests)
    unmarked = LocalDrafting()
    unmarked.session.is_late = True
    unmarked.launch([[5]] * 3)
    assert not any(request.is_announced for request in unmarked.requests)


def fails(*_: object) -> None:
    raise SegmentError("cuStreamWriteValue32_v2: not supported (CUDA error 801)")


def test_a_device_that_cannot_write_announces_nothing(caplog):
    """An announcement that fails leaves no gap in the generations of the features."""
    local = LocalDrafting(write_value=fails)
    for token in (5, 6):
        step = local.step([[token]] * 3)
        assert local.announced == []
        assert isinstance(step, pb.DraftStep)
        assert (step.step_id, step.features.span.generation) == (token - 2, token - 2)
        local.answer(step)
    assert caplog.text.count("cuStreamWriteValue32_v2") == 1


def test_a_drafter_has_no_more_announced_steps_than_it_takes(local):
    for number in range(MAX_ANNOUNCED + 2):
        local.launch([[5]] * 3)
        assert len(local.announced) == min(number + 1, MAX_ANNOUNCED)


def test_nothing_of_a_lost_drafter_waits_for_a_collector(local):
    """A session is freed without the garbage collector, because the session holds shared memory."""
    local.step([[5]] * 3)
    assert local.session.committed is not None
    local.answer(local.steps[-1])
    assert local.session.committed is None
    local.step([[5]] * 3)
    assert local.session.committed is not None
    session = weakref.ref(local.session)
    gc.collect()
    gc.disable()
    try:
        local.scene.disconnect(local.stream)
        assert session() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["features in the message", "no drafts", "behind the stream", "late"])
def test_nothing_is_announced_that_a_drafter_cannot_begin(why):
    local = LocalDrafting(shares_features=why != "features in the message")
    if why == "no drafts":
        local.session.pace.policy.pin(0)
    elif why == "behind the stream":
        local.stream.send(pb.DraftStep(step_id=50, closed_ids=range(100_000)))  # too long for the ring
    elif why == "late":
        local.session.is_late = True
    local.launch([[5]] * 3)
    assert local.announced == []
