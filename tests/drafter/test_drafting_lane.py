"""Steps and drafts that go straight from engine to engine, beside the stream."""

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

from drafter_service import stream as stream_module
from draftwire.carriers import Rendezvous, SharedSegments, TensorSender, VerifierBoard
from draftwire.carriers import lane as lane_module
from draftwire.config import DENSE, GUMBEL
from draftwire.mailbox import Mailbox
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb

CARRIERS = [pb.CARRIER_SHM, pb.CARRIER_BYTES]


class Direct:
    """A verifier's stream after both hellos, and its lane."""

    def __init__(self, stream: VerifierStream, shared: SharedSegments) -> None:
        assert shared.lane is not None
        assert shared.board is not None
        self.stream = stream
        self.board = VerifierBoard(shared.board, torch.device("cpu"))
        self.sender = TensorSender(torch.device("cpu"), shared.outgoing)
        self._lane = lane = shared.lane
        self._box: Mailbox[bytes] = Mailbox()
        self._box.watch(lane.fileno(), lane.receive)

    def send(self, step: pb.DraftStep) -> None:
        assert self._lane.send(pb.DraftRequest(step=step).SerializeToString())

    def foretell(self, step: pb.DraftStep, **changes: Any) -> None:
        """Tells what a step will be, and puts its features where it has them then; `changes` are made to what is told.
        """
        (tokens,), (count,) = [_ints(step.tokens)], step.num_rows
        drawn = self.board.post(torch.tensor([[count, *tokens, *[-1] * (5 - count)]], dtype=torch.int32))
        features = self.sender.begin(torch.float32, tuple(step.features.shape))
        data = bytearray(step.features.data)
        features.tensor.copy_(torch.frombuffer(data, dtype=torch.float32).view_as(features.tensor))
        upcoming = pb.UpcomingStep(
            sequence_ids=step.sequence_ids,
            first_rows=step.first_rows,
            num_drafts=step.num_drafts,
            drawn=drawn,
            columns=6,
            features_offset=features.offset,
        )
        upcoming.MergeFrom(pb.UpcomingStep(**changes))
        assert self._lane.send(pb.DraftRequest(upcoming=upcoming).SerializeToString())
        step.features.Clear()
        features.finish(step.features)

    def send_bytes(self, message: bytes) -> None:
        assert self._lane.send(message)

    def read(self) -> pb.Drafts:
        return pb.DraftResponse.FromString(self._box.get(TIMEOUT_S)).drafts

    def ask(self, step: pb.DraftStep) -> pb.Drafts:
        self.send(step)
        return self.read()


@contextmanager
def connected(drafter: ServedDrafter, config: dict[str, Any] | None = None) -> Iterator[Direct]:
    with Rendezvous() as rendezvous:
        message = hello(config, carriers=CARRIERS)
        message.rendezvous.CopyFrom(rendezvous.encode())
        shared: list[SharedSegments] = []
        serving = threading.Thread(
            target=lambda: shared.append(rendezvous.serve(CARRIERS, CARRIERS, 0, torch.device("cpu")))
        )
        serving.start()
        stream = drafter.stream()
        answer = stream.ask(message)
        serving.join()
    assert answer.hello.direct
    direct = Direct(stream, shared[0])
    yield direct
    direct._lane.close()
    stream.end()


def _ints(tensor: pb.Tensor) -> list[int]:
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.int32).tolist()


def first_step(text: Text) -> pb.DraftStep:
    return step_message(1, [Rows(1, text, 0, 5, drafts=4)], new=[1])


def test_a_verifier_that_cannot_be_met_gets_everything_over_the_stream(drafter: ServedDrafter) -> None:
    stream = drafter.stream()
    assert not stream.ask(hello()).hello.direct
    stream.end()


def test_drafts_are_the_same_over_the_lane_and_over_the_stream(drafter: ServedDrafter) -> None:
    text = Text(3)
    plain = drafter.connect()
    expected = plain.ask(first_step(text)).drafts
    plain.end()
    with connected(drafter) as direct:
        found = direct.ask(first_step(text))
    assert found.tokens == expected.tokens
    assert list(found.committed_lengths) == list(expected.committed_lengths)


def test_a_step_that_was_foretold_gets_the_same_drafts_begun_before_it_came(drafter: ServedDrafter) -> None:
    text = Text(4)
    steps = [first_step(text), *(step_message(2 + i, [Rows(1, text, 5 + 2 * i, 2, drafts=4)]) for i in range(5))]
    with connected(drafter) as direct:
        expected = [direct.ask(step).tokens.data for step in steps]
    before = drafter.engine.state.taken_ahead
    with connected(drafter) as direct:
        found = [direct.ask(steps[0]).tokens.data]
        for step in steps[1:]:
            direct.foretell(step)
            deadline = time.monotonic() + TIMEOUT_S
            while not drafter.engine.engine.ahead.has_begun and time.monotonic() < deadline:
                time.sleep(0.001)
            found.append(direct.ask(step).tokens.data)
    assert found == expected
    assert drafter.engine.state.taken_ahead == before + 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_ids": [1]}, "first_rows = '1 entries'.* must be as many as upcoming.sequence_ids, 2"),
        ({"first_rows": [1]}, "upcoming.first_rows"),
        ({"sequence_ids": [1], "first_rows": [5], "num_drafts": [4]}, "upcoming.sequence_ids.* each id at most once"),
        ({"sequence_ids": [2], "first_rows": [5], "num_drafts": [0]}, r"upcoming.num_drafts = 0: allowed range \[1, 4"),
        ({"sequence_ids": [2], "first_rows": [5], "num_drafts": [5]}, r"upcoming.num_drafts = 5: allowed range \[0, "),
        ({"columns": 1}, r"upcoming.columns = 1: allowed range \[2, num_speculative_tokens \+ 2 = 6\]"),
        ({"columns": 7}, "upcoming.columns = 7"),
        ({"drawn": pb.SharedSpan(generation=1, offset=64)}, "upcoming.drawn.offset = 64"),
        ({"drawn": pb.SharedSpan(generation=1 << 40)}, "upcoming.drawn.generation"),
    ],
)
def test_what_is_foretold_malformed_is_named(drafter: ServedDrafter, changes: dict[str, Any], message: str) -> None:
    text = Text(4)
    with connected(drafter) as other, connected(drafter) as direct:
        direct.ask(first_step(text))
        direct.foretell(step_message(2, [Rows(1, text, 5, 2, drafts=4)]), **changes)
        code, told = direct.stream.error()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(message, told), told
        assert other.ask(first_step(Text(8))).step_id == 1


def test_a_verifier_that_foretells_steps_and_sends_none_is_ended(drafter: ServedDrafter) -> None:
    text = Text(4)
    with connected(drafter) as other, connected(drafter) as direct:
        direct.ask(first_step(text))
        for number in range(stream_module.MAX_FORETOLD_STEPS + 1):
            direct.foretell(step_message(2, [Rows(1, text, 6 + number, 2, drafts=4)]))
        code, told = direct.stream.error()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert told == "16 steps were foretold and did not come"
        assert other.ask(first_step(Text(8))).step_id == 1


def test_nothing_is_foretold_over_the_stream(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    stream.ask(first_step(Text(4)))
    stream._requests.put(pb.DraftRequest(upcoming=pb.UpcomingStep(sequence_ids=[1])))
    code, told = stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "message = 'upcoming': must be a step after the hello" in told


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
            if step_id % 3 == 0:  # later ones do not overtake it
                answers = [direct.read() for _ in range(3 if step_id > 3 else 2)]
                assert [answer.step_id for answer in answers][-1] == step_id
                assert all(list(answer.statuses) == [pb.SEQUENCE_STATUS_OK] for answer in answers)


def test_logits_go_with_the_drafts(drafter: ServedDrafter) -> None:
    config = {"draft_sample_method": GUMBEL, "draft_logits": config_pb2.DraftLogits(form=DENSE)}
    with connected(drafter, config) as direct:
        answer = direct.ask(first_step(Text(5)))
    assert list(answer.logits.shape) == [4, DRAFT_VOCAB]


def test_an_answer_that_does_not_fit_and_all_after_it_go_over_the_stream(
    drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(6)
    with connected(drafter) as direct:
        step = first_step(text)
        monkeypatch.setattr(lane_module, "MAX_MESSAGE_BYTES", 8)
        direct.stream.send(step)
        drafts = direct.stream.read().drafts  # written twice, for the lane and for the stream
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


def test_a_lane_that_its_peer_closes_leaves_the_stream(drafter: ServedDrafter) -> None:
    text = Text(10)
    with connected(drafter) as direct:
        assert direct.ask(first_step(text)).step_id == 1
        direct._lane.close()
        direct.stream.send(step_message(2, [Rows(1, text, 5, 1, drafts=2)]))
        assert direct.stream.read().drafts.step_id == 2
