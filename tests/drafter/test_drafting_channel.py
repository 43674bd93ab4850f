"""Steps and drafts over the direct channel between two engines, beside the gRPC stream."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from harness import Rows, Text
from served import TIMEOUT_S, ServedDrafter, VerifierStream, hello, step_message
from tiny_head import DRAFT_VOCAB

from drafter_service.server import stream as stream_module
from drafter_service.server.step_decoder import MAX_ANNOUNCED
from draftwire.contract.validation import DENSE, GUMBEL
from draftwire.transport import Record, Rendezvous, SharedSegments, TensorSender, rendezvous
from draftwire.transport import ring as ring_module
from draftwire.transport.mailbox import Mailbox
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb

CARRIERS = [pb.CARRIER_SHM, pb.CARRIER_BYTES]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer timeout of the rendezvous, so that a slow machine still gets a channel."""
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", TIMEOUT_S)


class Direct:
    """A verifier's stream and channel after the handshake."""

    def __init__(self, stream: VerifierStream, shared: SharedSegments) -> None:
        assert shared.channel is not None
        self.stream = stream
        self.sender = TensorSender(torch.device("cpu"), shared.outgoing)
        self.early: list[Record] = []
        self.channel = channel = shared.channel
        self._num_announced = 0
        self._box: Mailbox[bytes] = Mailbox()
        self._box.watch(channel.fileno(), self._receive)

    def _receive(self) -> list[bytes]:
        records = self.channel.receive()
        self.early += [record for record in records if record.body is not None]
        return [record.message for record in records if record.body is None]

    def send(self, step: pb.DraftStep | pb.Commit) -> None:
        request = pb.DraftRequest(step=step) if isinstance(step, pb.DraftStep) else pb.DraftRequest(commit=step)
        assert self.channel.send(request.SerializeToString())

    def announce(self, step: pb.DraftStep, num_numbers: int = 6, **changes: Any) -> pb.Commit:
        """Announce a step of one sequence, with `changes`, and return its commit."""
        tokens, (count,) = _ints(step.tokens), step.num_rows
        features = self.sender.begin(torch.float32, tuple(step.features.shape))
        data = bytearray(step.features.data)
        features.tensor.copy_(torch.frombuffer(data, dtype=torch.float32).view_as(features.tensor))
        self._num_announced += 1
        announce = pb.Announce(
            announced_id=self._num_announced,
            sequence_ids=step.sequence_ids,
            first_rows=step.first_rows,
            num_drafts=step.num_drafts[0],
            columns=6,
            num_rows=count,
        )
        features.announce(announce.features)
        announce.MergeFrom(pb.Announce(**changes))
        numbers = torch.tensor([[count, *tokens, *[-1] * (5 - count)]], dtype=torch.int32)
        request = pb.DraftRequest(announce=announce)
        assert self.channel.send(request.SerializeToString(), numbers[:, :num_numbers] if num_numbers else None)
        return pb.Commit(step_id=step.step_id, announced_id=self._num_announced, num_drafts=step.num_drafts)

    def send_bytes(self, message: bytes) -> None:
        assert self.channel.send(message)

    def read(self) -> pb.Drafts:
        return pb.DraftResponse.FromString(self._box.get(TIMEOUT_S)).drafts

    def ask(self, step: pb.DraftStep | pb.Commit) -> pb.Drafts:
        self.send(step)
        return self.read()


@contextmanager
def connected(drafter: ServedDrafter, config: dict[str, Any] | None = None) -> Iterator[Direct]:
    with Rendezvous() as meeting:
        message = hello(config, carriers=CARRIERS)
        message.rendezvous.CopyFrom(meeting.encode())
        shared: list[SharedSegments] = []
        serving = threading.Thread(
            target=lambda: shared.append(meeting.serve(CARRIERS, CARRIERS, 0, torch.device("cpu")))
        )
        serving.start()
        stream = drafter.stream()
        answer = stream.ask(message)
        serving.join()
    assert answer.hello.direct
    direct = Direct(stream, shared[0])
    yield direct
    direct.channel.close()
    stream.end()


def _ints(tensor: pb.Tensor) -> list[int]:
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.int32).tolist()


def first_step(text: Text) -> pb.DraftStep:
    return step_message(1, [Rows(1, text, 0, 5, drafts=4)], new=[1])


def test_an_unreachable_verifier_gets_everything_over_the_stream(drafter: ServedDrafter) -> None:
    stream = drafter.stream()
    assert not stream.ask(hello()).hello.direct
    stream.end()


def test_drafts_are_the_same_through_the_ring_and_the_stream(drafter: ServedDrafter) -> None:
    text = Text(3)
    plain = drafter.connect()
    expected = plain.ask(first_step(text)).drafts
    plain.end()
    with connected(drafter) as direct:
        found = direct.ask(first_step(text))
    assert found.tokens == expected.tokens
    assert list(found.committed_lengths) == list(expected.committed_lengths)


def test_committed_steps_get_the_same_drafts_early(drafter: ServedDrafter) -> None:
    text = Text(4)
    steps = [first_step(text), *(step_message(2 + i, [Rows(1, text, 5 + 2 * i, 2, drafts=4)]) for i in range(5))]
    with connected(drafter) as direct:
        expected = [direct.ask(step).tokens.data for step in steps]
    before = drafter.engine.state.taken_ahead
    with connected(drafter) as direct:
        found = [direct.ask(steps[0]).tokens.data]
        for step in steps[1:]:
            commit = direct.announce(step)
            deadline = time.monotonic() + TIMEOUT_S
            while not drafter.engine.engine.early.has_begun and time.monotonic() < deadline:
                time.sleep(0.001)
            found.append(direct.ask(commit).tokens.data)
        early = [record.body.read((1, 4)).tobytes() for record in direct.early if record.body is not None]
        ids = [pb.DraftResponse.FromString(record.message).early.announced_id for record in direct.early]
    assert found == expected
    assert (ids, early) == ([1, 2, 3, 4, 5], expected[1:])
    assert drafter.engine.state.taken_ahead == before + 5


def test_a_commit_over_the_stream_is_taken_too(drafter: ServedDrafter) -> None:
    text = Text(4)
    with connected(drafter) as direct:
        direct.ask(first_step(text))
        commit = direct.announce(step_message(2, [Rows(1, text, 5, 2, drafts=4)]))
        direct.stream.send_request(pb.DraftRequest(commit=commit))
        assert list(direct.read().num_drafts) == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"announced_id": 2}, "announce.announced_id = 2: must be 1"),
        ({"sequence_ids": [1]}, "first_rows = '1 entries'.* must be as many as announce.sequence_ids, 2"),
        ({"first_rows": [1]}, "announce.first_rows"),
        ({"sequence_ids": [1], "first_rows": [5]}, "announce.sequence_ids.* each id at most once"),
        ({"num_drafts": 5}, r"announce.num_drafts = 5: allowed range \[0, "),
        ({"columns": 1}, r"announce.columns = 1: allowed range \[2, num_speculative_tokens \+ 2 = 6\]"),
        ({"columns": 7}, "announce.columns = 7"),
        ({"columns": 5}, "announce = '6 numbers': must have 5"),
        ({"num_rows": 6}, r"announce.num_rows = 6: allowed range \[1, .* = 5\]"),
        ({"num_numbers": 5}, "announce = '5 numbers': must have 6"),
        ({"num_numbers": 0}, "announce = 'no body': must have 6"),
        ({"features": pb.SharedSpan(offset=64)}, "announce.features.offset = 64"),
        ({"features": pb.SharedSpan(generation=1 << 40)}, "announce.features.generation"),
    ],
)
def test_a_malformed_announcement_is_named(drafter: ServedDrafter, changes: dict[str, Any], message: str) -> None:
    text = Text(4)
    with connected(drafter) as other, connected(drafter) as direct:
        direct.ask(first_step(text))
        direct.announce(step_message(2, [Rows(1, text, 5, 2, drafts=4)]), **changes)
        code, detail = direct.stream.error()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(message, detail), detail
        assert other.ask(first_step(Text(8))).step_id == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_id": 3}, "step_id = 3: must be 2"),
        ({"announced_id": 0}, "commit.announced_id = 0: must be announced"),
        ({"announced_id": 2}, r"commit.announced_id = 2: must be announced, .*none is"),
        ({"announced_id": 9}, "commit.announced_id = 9: must be announced"),
        ({"num_drafts": []}, "commit.num_drafts = '0 entries': must be as many as .*, 1"),
        ({"num_drafts": [4, 4]}, "commit.num_drafts = '2 entries'"),
        ({"num_drafts": [5]}, r"commit.num_drafts = 5: allowed range \[0, num_drafts as announced = 4\]"),
        ({"closed_ids": [1]}, "commit.num_drafts = '1 entries': must be as many as .*, 0"),
        ({"logits_read": 7}, "logits_read = 7"),
    ],
)
def test_a_malformed_commit_is_named(drafter: ServedDrafter, changes: dict[str, Any], message: str) -> None:
    text = Text(4)
    with connected(drafter) as other, connected(drafter) as direct:
        direct.ask(first_step(text))
        commit = direct.announce(step_message(2, [Rows(1, text, 5, 2, drafts=4)]))
        for name, value in changes.items():
            commit.ClearField(name)
            commit.MergeFrom(pb.Commit(**{name: value}))
        direct.send(commit)
        code, detail = direct.stream.error()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(message, detail), detail
        assert other.ask(first_step(Text(8))).step_id == 1


@pytest.mark.parametrize("way", ["commit", "replace"])
def test_an_announced_step_is_committed_once(drafter: ServedDrafter, way: str) -> None:
    text = Text(4)
    with connected(drafter) as direct:
        direct.ask(first_step(text))
        commit = direct.announce(step_message(2, [Rows(1, text, 5, 2, drafts=4)]))
        direct.ask(commit if way == "commit" else pb.DraftStep(step_id=2, replaces=1))
        commit.step_id = 3
        direct.send(commit)
        code, detail = direct.stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "commit.announced_id = 1: must be announced, and neither committed nor replaced: none is" in detail


def test_nothing_is_replaced_that_was_not_announced(drafter: ServedDrafter) -> None:
    with connected(drafter) as direct:
        direct.send(pb.DraftStep(step_id=1, replaces=1))
        code, detail = direct.stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "replaces = 1: must be at most 0, announced so far" in detail


def test_a_verifier_that_announces_and_commits_nothing_is_ended(drafter: ServedDrafter) -> None:
    text = Text(4)
    with connected(drafter) as other, connected(drafter) as direct:
        direct.ask(first_step(text))
        for number in range(MAX_ANNOUNCED + 1):
            direct.announce(step_message(2, [Rows(1, text, 6 + number, 2, drafts=4)]))
        code, detail = direct.stream.error()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail == "4 announced steps are neither committed nor replaced"
        assert other.ask(first_step(Text(8))).step_id == 1


def test_nothing_is_announced_over_the_stream(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    stream.ask(first_step(Text(4)))
    stream.send_request(pb.DraftRequest(announce=pb.Announce(announced_id=1, sequence_ids=[1])))
    code, detail = stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "message = 'announce': must be a step after the hello" in detail


def test_steps_that_come_both_ways_are_taken_in_order(drafter: ServedDrafter) -> None:
    text = Text(4)
    with connected(drafter) as direct:
        assert direct.ask(first_step(text)).step_id == 1
        for step_id in range(2, 12):
            step = step_message(step_id, [Rows(1, text, 3 + step_id, 1, drafts=2)])
            if step_id % 3:
                direct.send(step)
            else:
                direct.stream.send(step)
            if step_id % 3 == 0:  # later steps do not overtake this step
                answers = [direct.read() for _ in range(3 if step_id > 3 else 2)]
                assert [answer.step_id for answer in answers][-1] == step_id
                assert all(list(answer.statuses) == [pb.SEQUENCE_STATUS_OK] for answer in answers)


def test_logits_go_with_the_drafts(drafter: ServedDrafter) -> None:
    config = {"draft_sample_method": GUMBEL, "draft_logits": config_pb2.DraftLogits(form=DENSE)}
    with connected(drafter, config) as direct:
        answer = direct.ask(first_step(Text(5)))
    assert list(answer.logits.shape) == [4, DRAFT_VOCAB]


def test_an_answer_without_room_and_later_ones_use_the_stream(
    drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(6)
    with connected(drafter) as direct:
        step = first_step(text)
        monkeypatch.setattr(ring_module, "MAX_MESSAGE_BYTES", 8)
        direct.stream.send(step)
        drafts = direct.stream.read().drafts  # written twice, for the ring and for the stream
        assert (drafts.step_id, list(drafts.num_drafts), list(drafts.tokens.shape)) == (1, [4], [4])
        monkeypatch.undo()
        direct.send(step_message(2, [Rows(1, text, 5, 1, drafts=2)]))
        assert direct.stream.read().drafts.step_id == 2


def test_the_last_step_is_answered_before_the_stream_ends(drafter: ServedDrafter) -> None:
    with connected(drafter) as direct:
        direct.send(first_step(Text(7)))
        direct.stream.end()
        assert direct.read().step_id == 1
        assert direct.stream.error()[0] == grpc.StatusCode.OK


MALFORMED = {
    "noise": b"\xff" * 100,
    "a second hello": pb.DraftRequest(hello=hello()).SerializeToString(),
    "a gap in the steps": pb.DraftRequest(step=pb.DraftStep(step_id=7)).SerializeToString(),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_ends_the_stream_and_nothing_else(drafter: ServedDrafter, name: str) -> None:
    with connected(drafter) as other, connected(drafter) as direct:
        direct.send_bytes(MALFORMED[name])
        code, _ = direct.stream.error()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert other.ask(first_step(Text(8))).step_id == 1


def test_too_many_unanswered_steps_end_the_stream(drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNANSWERED_STEPS", 0)
    with connected(drafter) as direct:
        direct.send(first_step(Text(9)))
        code, text = direct.stream.error()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "0 steps are unanswered" in text


def test_a_channel_that_its_peer_closes_leaves_the_stream(drafter: ServedDrafter) -> None:
    text = Text(10)
    with connected(drafter) as direct:
        assert direct.ask(first_step(text)).step_id == 1
        direct.channel.close()
        direct.stream.send(step_message(2, [Rows(1, text, 5, 1, drafts=2)]))
        assert direct.stream.read().drafts.step_id == 2
