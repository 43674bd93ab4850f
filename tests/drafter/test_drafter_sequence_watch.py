"""The drafter's log lines name the verifier's requests."""

from __future__ import annotations

import logging

import grpc
import numpy as np
import pytest
from served import ServedDrafter, step_message

from drafter_service.engine.answer import Answer
from drafter_service.server.sequence_log import MAX_NAMED, SequenceWatch
from draftwire.v1 import draft_pb2 as pb


def opening(request_ids: list[str], first_id: int = 1) -> pb.DraftStep:
    ids = range(first_id, first_id + len(request_ids))
    return pb.DraftStep(opened=pb.OpenSequences(ids=ids, request_ids=request_ids))


def drafts_for(*counts: int) -> Answer:
    """Return an answer with these numbers of drafts for the sequences 1, 2, ..."""
    answer = Answer(1)
    ones = np.ones(len(counts), np.int64)
    answer.add_sequences(list(range(1, len(counts) + 1)), ones, ones)
    answer.add_drafts(np.array(counts), np.zeros(sum(counts), np.int32))
    return answer


def lines_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, object]]]:
    """Return (level, message, fields) of each line."""
    return [(one.levelname, one.getMessage(), getattr(one, "fields", {})) for one in caplog.records]


def test_a_sequence_is_logged_when_it_opens_and_ends(caplog):
    caplog.set_level(logging.DEBUG)
    watch = SequenceWatch("verifier-7")
    watch.take_step(opening(["r-1", "r-2"]))
    watch.take_answer(drafts_for(4, 3))
    watch.take_answer(drafts_for(2))
    watch.take_step(pb.DraftStep(closed_ids=[1]))
    lines = lines_of(caplog)
    assert [(level, message) for level, message, _ in lines] == [
        ("DEBUG", "sequence opened"), ("DEBUG", "sequence opened"), ("DEBUG", "sequence ended")
    ]  # fmt: skip
    last = lines[-1][2]
    assert last.pop("seconds") >= 0
    assert last == {
        "verifier": "verifier-7",
        "request_id": "r-1",
        "sequence_id": 1,
        "reason": "closed",
        "steps": 2,
        "drafts": 6,
    }


def test_a_sequence_that_is_not_taken_is_a_warning(caplog):
    watch = SequenceWatch("v")
    watch.take_step(opening(["r-1"]))
    answer = Answer(1)
    answer.add_failure(1, pb.SEQUENCE_STATUS_NO_CAPACITY)
    watch.take_answer(answer)
    ((level, _, values),) = lines_of(caplog)
    assert (level, values["request_id"], values["status"]) == ("WARNING", "r-1", "no_capacity")


def test_an_error_names_the_requests_whose_drafts_end(caplog):
    watch = SequenceWatch("v")
    watch.take_step(opening([f"r-{i}" for i in range(100)]))
    watch.end(RuntimeError("out of memory"))
    ((level, _, values),) = lines_of(caplog)
    assert (level, values["error"], values["sequences"]) == ("WARNING", "out of memory", 100)
    assert values["request_ids"] == [f"r-{i}" for i in range(MAX_NAMED)]


def test_an_orderly_end_and_usual_work_are_no_lines(caplog):
    caplog.set_level(logging.INFO)
    watch = SequenceWatch("v")
    watch.take_step(opening(["r-1"]))
    watch.take_answer(drafts_for(4))
    watch.end(None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "b"], "opened.request_ids = '2 entries': must be as many as opened.ids, 1"),
        (["two\nlines"], "opened.request_ids = 'two\\nlines': allowed: 1 to 128 visible ASCII characters"),
        (["x" * 129], "1 to 128 visible ASCII characters"),
    ],
)
def test_names_that_are_none_end_the_stream(drafter: ServedDrafter, names: list[str], text: str):
    refuse(drafter, text, request_ids=names)


@pytest.mark.parametrize("traceparent", ["00-1-2-01", "00-" + "g" * 32 + "-" + "0" * 16 + "-01", "x\n"])
def test_a_trace_that_is_none_ends_the_stream(drafter: ServedDrafter, traceparent: str):
    refuse(drafter, "must be a W3C traceparent", traceparents=[traceparent])
    refuse(drafter, "must be as many as opened.ids, 1", traceparents=["", ""])


def refuse(drafter: ServedDrafter, text: str, **opened: list[str]) -> None:
    """Open a sequence with the fields `opened`, and check that the drafter refuses them."""
    stream = drafter.connect()
    step = step_message(1, new=[1])
    step.opened.MergeFrom(pb.OpenSequences(**opened))
    stream.send(step)
    code, details = stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text in details
