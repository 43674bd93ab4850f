"""Drafts of requests that have moved to another drafter."""

from __future__ import annotations

import pytest
from drafting_scene import K, Scene
from engine_scene import Served, scheduling  # noqa: F401

from verifier_service.drafters.budgeting import LEARN_FROM
from verifier_service.drafters.stream import Disconnected, Draining
from verifier_service.engine.step import Stage, Step


def test_a_request_that_moves_leaves_its_drafts_behind():
    scene = Scene()
    draining = scene.connect()
    request = scene.decode()
    scene.flush()
    scene.connect(max_drafts=1)
    scene.drafting.handle(Draining(draining))
    scene.answer(draining)
    assert request.drafts is not None
    scene.flush()
    assert scene.drafting.placement.is_bound(request)
    assert request.drafts is None


def test_drafts_are_not_counted_for_the_next_drafter():
    scene = Scene()
    lost = scene.connect()
    requests = [scene.decode() for _ in range(LEARN_FROM)]
    scene.flush()
    scene.answer(lost)
    offered = [request.drafts for request in requests]
    scene.connect(max_drafts=1)
    scene.disconnect(lost)
    for request in requests:
        scene.verify(request, 5, 9)
    scene.flush()
    budget = scene.drafting.budget
    for request, drafts in zip(requests, offered, strict=True):
        assert drafts is not None
        assert scene.drafting.placement.is_bound(request)
        budget.count(request, drafts, K, 1)
    budget.learn()
    assert sum(budget.offered.values()) == 0


@pytest.mark.usefixtures("scheduling")
def test_requests_move_during_a_step_to_one_with_fewer_drafts(target):
    served = Served(target, num_blocks=65)
    lost = served.connect()
    requests = [served.submit([1 + i, 2, 3], keys=100 * i, max_tokens=40) for i in range(8)]
    steps: list[Step] = []

    def end(step: Step) -> None:
        steps.append(step)
        if sum(row.num_drafts > 0 for step in steps for row in step.rows) == 2 * len(requests):
            served.connect([5], max_drafts=1)
            served.engine.post(Disconnected(lost))

    served.on_stage(Stage.SAMPLED, end)
    outputs = served.run(*requests)
    assert [len(tokens) for tokens in outputs] == [40] * 8
    assert not served.has_failed.is_set()
    assert any(row.num_drafts == 1 for step in steps for row in step.rows)
