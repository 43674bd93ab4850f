"""Outputs of steps that are launched ahead: held back for some steps, and lost in none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_scene import Watched, run_all
from engine_scene import K

from draftwire.contract.errors import ServerError
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import SampledTokens
from verifier_service.core.step_times import StepMarks
from verifier_service.core.stop_conditions import Piece
from verifier_service.engine.outputs import RequestOutputs, response
from verifier_service.engine.step import Step


class Mark:
    """An event that a GPU has passed, or has not yet."""

    def __init__(self, *, is_passed: bool) -> None:
        self.query = lambda: is_passed


def executed(*, is_done: bool | None) -> Step:
    """A step on a GPU, or (None) on a CPU."""
    mark: Any = Mark(is_passed=bool(is_done))
    return Step((), marks=None if is_done is None else StepMarks(mark, mark, mark))


def test_output_waits_a_few_steps_while_the_device_waits_for_us():
    nothing: Any = None
    delivered: list[Any] = []
    outputs = RequestOutputs(
        *(nothing, nothing, nothing, delivered.append, nothing, torch.device("cpu")), is_synthetic=False
    )

    def is_held(step: Step | None, committing: Step) -> bool:
        delivered.clear()
        outputs.refuse(nothing, ServerError("an item"))
        outputs.deliver_behind(step, committing)
        return not delivered

    late, early, on_cpu = (executed(is_done=one) for one in (True, False, None))
    assert [is_held(early, late) for _ in range(9)] == [True, True, True, False, True, True, True, False, True]
    assert not is_held(early, early)
    assert not is_held(None, late)  # nothing comes after it
    assert not is_held(early, on_cpu)
    assert [is_held(early, late) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("kind", [{}, {"logprobs": 1, "k": K}, {"k": K}])
def test_output_that_is_held_back_loses_nothing(target, kind, monkeypatch):

    def deliver_sometimes(outputs: RequestOutputs, *_: Any) -> None:
        if own.engine.times.read().steps % 4 == 0:
            outputs.deliver()

    monkeypatch.setattr(RequestOutputs, "deliver_behind", deliver_sometimes)
    requests = [{"max_tokens": 30, "k": 0, **kind}, {"prompt": [2, 7], "max_tokens": 22, "k": 0, **kind}]
    own = Watched(target)
    if "k" in kind:
        own.connect()
    made = [own.submit(**one) for one in requests]
    own.engine.start()
    messages = [[own.next(one)] for one in made]
    for one, its in zip(made, messages, strict=True):
        while its[-1].finish_reason == generate_pb2.FINISH_REASON_UNSPECIFIED:  # type: ignore[union-attr]
            its.append(own.next(one))
    own.engine.stop()
    monkeypatch.undo()
    expected, _ = run_all(target, [{**one, "k": 0} for one in requests], is_async=False)
    for one, its, (tokens, _) in zip(made, messages, expected, strict=True):
        assert [token for item in its for token in item.token_ids] == tokens  # type: ignore[union-attr]
        assert len(its) < one.verify_steps
        statistics = its[-1].statistics  # type: ignore[union-attr]
        assert statistics.verify_tokens == len(tokens) - 1
        assert sum(flag for item in its for flag in item.drafted) == sum(statistics.accepted)  # type: ignore[union-attr]
        if "logprobs" in kind:
            assert sum(len(item.logprobs) for item in its) == len(tokens)  # type: ignore[union-attr]


def test_a_message_may_have_the_tokens_of_several_steps():
    def rows(tokens: list[int], num_drafts: int = 0, **end: Any) -> Any:
        piece = Piece(tokens, **end)
        return SimpleNamespace(num_drafts=num_drafts, sampled=SampledTokens(tokens), piece=piece, statistics=None)

    last = rows([9], finish_reason=generate_pb2.FINISH_REASON_STOP, stop_token_id=9)
    message = response([rows([5]), rows([6, 7, 8], num_drafts=2), last])
    assert list(message.token_ids) == [5, 6, 7, 8, 9]
    assert list(message.drafted) == [False, True, True, False, False]
    assert (message.finish_reason, message.stop_token_id) == (generate_pb2.FINISH_REASON_STOP, 9)
