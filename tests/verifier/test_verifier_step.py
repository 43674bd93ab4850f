"""The lifecycle of a step."""

from __future__ import annotations

import pytest
from engine_scene import Served, make_target, scheduling  # noqa: F401

from verifier_service.engine.step import Stage, Step


def test_a_step_tells_each_stage_and_skips_none():
    seen: list[Stage] = []
    step = Step((), lambda one: seen.append(one.stage))
    for stage in (Stage.PRELAUNCHED, Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED):
        step.advance(stage)
    assert seen == [Stage.PRELAUNCHED, Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED]
    step.abandon()  # too late
    assert step.stage is Stage.COMMITTED
    with pytest.raises(AssertionError):
        Step(()).advance(Stage.SAMPLED)


def test_a_step_is_abandoned_once():
    seen: list[Stage] = []
    step = Step((), lambda one: seen.append(one.stage))
    step.abandon()
    step.abandon()
    assert seen == [Stage.ABANDONED]


@pytest.mark.usefixtures("scheduling")
def test_the_steps_of_an_engine_are_all_committed_in_order():
    own = Served(make_target())
    stages: dict[Step, list[Stage]] = {}
    for stage in (Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED, Stage.ABANDONED):
        own.on_stage(stage, lambda step: stages.setdefault(step, []).append(step.stage))
    one = own.submit(k=0, max_tokens=10)
    own.run(one)
    assert len(stages) >= 10
    assert all(seen == [Stage.RELEASED, Stage.SAMPLED, Stage.COMMITTED] for seen in stages.values())
