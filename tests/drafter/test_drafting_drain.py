"""A draining drafter: open sequences continue, new ones are refused, and the drain ends."""

from __future__ import annotations

import grpc
import pytest
from harness import NO_CAPACITY, OK, Rows, Text
from served import TIMEOUT_S, ServedDrafter, hello, step_message

from draftwire.v1 import draft_pb2 as pb


def test_a_draining_drafter_is_done_when_every_verifier_left(drafter: ServedDrafter) -> None:
    streams = [drafter.connect() for _ in range(2)]
    drained = drafter.drain(TIMEOUT_S)
    assert [stream.read() for stream in streams] == [pb.DraftResponse(draining=pb.Draining(timeout_s=TIMEOUT_S))] * 2
    streams[0].end()
    assert streams[0].error()[0] == grpc.StatusCode.OK
    assert not drained.done()
    streams[1].end()
    assert drained.result(TIMEOUT_S) is None


def test_a_drafter_without_verifiers_is_done_at_once(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    stream.end()
    assert stream.error()[0] == grpc.StatusCode.OK
    drafter.drain(1000 * TIMEOUT_S).result(TIMEOUT_S)


def test_open_sequences_go_on_and_new_ones_are_refused(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    stream.ask(step_message(1, [Rows(1, Text(1), 0, 5, 2)], [1]))
    drafter.drain(TIMEOUT_S)
    assert stream.read().HasField("draining")
    answer = stream.ask(step_message(2, [Rows(1, Text(1), 5, 2, 2), Rows(2, Text(2), 0, 5, 2)], [2])).drafts
    assert dict(zip(answer.sequence_ids, answer.statuses, strict=True)) == {1: OK, 2: NO_CAPACITY}
    stream.end()


def test_no_further_session_is_taken(drafter: ServedDrafter) -> None:
    stream = drafter.connect()
    drafter.drain(TIMEOUT_S)
    assert stream.read().HasField("draining")
    code, text = drafter.refusal(hello())
    assert (code, "the drafter is draining" in text) == (grpc.StatusCode.UNAVAILABLE, True)
    stream.end()


@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_the_wait_for_verifiers_that_do_not_leave_has_an_end(drafter: ServedDrafter, timeout_s) -> None:
    drafter.connect()
    drafter.drain(timeout_s).result(TIMEOUT_S)
