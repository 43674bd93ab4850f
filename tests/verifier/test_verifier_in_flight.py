"""What happens while a step is in flight: answers that are late, drafters that come and go, requests that arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_scene import HIDDEN, K, Served, scheduling  # noqa: F401

from draftwire.model.tensors import decode_tensor
from draftwire.v1 import generate_pb2
from verifier_service.drafters import session as draft_session
from verifier_service.engine.step import Stage, Step

pytestmark = pytest.mark.usefixtures("scheduling")

STEP_S = 0.05


def on_launch(own: Served, act: Callable[[Any], object]) -> None:
    """Has `act` called with the rows of each step when it has been launched."""
    own.on_stage(Stage.SAMPLED, lambda step: act(step.rows))


@pytest.mark.parametrize("prompt", [5, 40])
def test_no_row_without_features_is_sent(target, prompt):
    """A drafter connects while a step is in flight, whose rows its store has not."""
    own = Served(target, max_prefill_rows=16)
    launches = 0
    empty: list[int] = []

    def watch(step: Any) -> None:
        if step.num_rows:
            rows = decode_tensor(step.features, "features", torch.float32, (sum(step.num_rows), 2 * HIDDEN))
            at = 0
            for first, count in zip(step.first_rows, step.num_rows, strict=True):
                empty.extend(first + i for i in range(count) if not rows[at + i].any())
                at += count

    def act(_: Any) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            stream = own.connect()
            answer = stream.on_send
            stream.on_send = lambda step: (watch(step), answer(step))

    on_launch(own, act)
    one = own.submit([1 + i % 7 for i in range(prompt)], max_tokens=12)
    own.run(one)
    assert empty == []


@pytest.mark.parametrize("kind", [{"presence_penalty": 0.5}, pytest.param({"min_tokens": 50}, marks=pytest.mark.full)])
def test_requests_without_drafts_share_steps(target, kind):
    """The second arrives while a step of the first is in flight."""
    own = Served(target)
    sizes: list[int] = []
    made: list[Any] = []

    def act(works: Any) -> None:
        sizes.append(len(works))
        if len(sizes) == 4:
            made.append(own.submit([2, 7], k=0, max_tokens=50, **kind))

    on_launch(own, act)
    first = own.submit(k=0, max_tokens=50, **kind)
    own.engine.start()
    own.tokens(first)
    own.tokens(made[0])
    own.engine.stop()
    assert sizes.count(1) < 12, sizes


def test_a_lost_drafter_frees_its_requests(target, monkeypatch):
    monkeypatch.setattr(draft_session, "LOST_AFTER_S", 0.3)
    own = Served(target)
    stream = own.connect()
    stream.on_send = lambda _: None
    one = own.submit(max_tokens=12)
    own.run(one)


@pytest.mark.parametrize("number", [1, 3])
def test_a_failed_launch_does_not_leave_the_queue_asleep(target, number):
    own = Served(target, max_num_seqs=1)
    calls: list[Step] = []

    def fail(step: Step) -> None:
        calls.append(step)
        if len(calls) == number:
            raise RuntimeError("lost")

    own.on_stage(Stage.RELEASED, fail)
    first, second = own.submit(k=0), own.submit(k=0)
    own.engine.start()
    assert "lost" in own.error(first)
    own.tokens(second)
    own.engine.stop()


@pytest.mark.full
def test_one_missed_deadline_costs_one_step_without_drafts(target):
    """The late answer comes while the step without its drafts is in flight."""
    own = Served(target, draft_deadline_s=0.5, adaptive_k=False)
    stream = own.connect()
    answer = stream.on_send
    held: list[Any] = []
    asked: list[Any] = []
    drafts: list[int] = []

    def on_send(step: Any) -> None:
        if any(step.num_drafts):
            asked.append(step)
        if len(asked) == 3 and asked[-1] is step:
            held.append(step)
        else:
            answer(step)

    def act(works: Any) -> None:
        drafts.append(sum(work.num_drafts for work in works))
        if held:
            answer(held.pop())

    stream.on_send = on_send
    on_launch(own, act)
    one = own.submit(max_tokens=40)
    own.run(one)
    assert drafts[1:-1].count(0) == 1, drafts
    causes = Counter({generate_pb2.FallbackCause.Name(c.cause): c.tokens for c in own.engine.counters().fallbacks})
    assert causes["FALLBACK_CAUSE_LATE"] == 1, causes
