"""The engine's counters: each second of its thread is in one phase; waits are split between drafter and wire."""

from __future__ import annotations

import math

import pytest

from draftwire.server.step_histogram import StepHistogram
from draftwire.v1 import draft_pb2
from verifier_service.core.step_times import Phase, StepMarks, StepTimes


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.times = StepTimes(self.clock)

    def spend(self, phase: Phase, seconds: float) -> None:
        self.times.enter(phase)
        self.clock.now += seconds

    def step(self, waited: float, computed: float) -> None:
        """Run a step that waits for drafts, which the drafter computes in `computed` seconds."""
        self.spend(Phase.WAIT, waited)
        self.times.enter(Phase.HOST)
        self.times.count_answer(computed)
        self.spend(Phase.VERIFY, 4)
        self.spend(Phase.SAMPLE, 2)
        self.spend(Phase.HOST, 1)
        self.times.end_step()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def times_of(scene: Scene) -> dict[str, float]:
    return {field.name: value for field, value in scene.times.read().times.ListFields()}


def test_every_second_belongs_to_one_phase(scene):
    scene.spend(Phase.IDLE, 50)
    scene.spend(Phase.HOST, 1)
    scene.spend(Phase.VERIFY, 4)
    scene.spend(Phase.SAMPLE, 2)
    assert times_of(scene) == {"idle_s": 50}  # the step counts when it ends
    assert scene.times.end_step() == (6, 1)
    assert times_of(scene) == {"idle_s": 50, "host_s": 1, "verify_s": 4, "sample_s": 2}


def test_a_wait_is_split_into_the_drafters_and_the_wires(scene):
    scene.step(waited=5, computed=3)
    assert times_of(scene) == {"draft_s": 3, "wire_s": 2, "verify_s": 4, "sample_s": 2, "host_s": 1}


def test_drafts_computed_while_nobody_waited_cost_no_time(scene):
    scene.step(waited=1, computed=3)
    assert times_of(scene)["draft_s"] == 1
    assert "wire_s" not in times_of(scene)


def test_the_threads_work_during_drafting_is_the_drafters_time(scene):
    scene.times.end_step()
    scene.spend(Phase.HOST, 2)  # one second for the message, and one while the drafter computes
    scene.spend(Phase.WAIT, 1)
    scene.times.enter(Phase.HOST)
    scene.times.count_answer(2)
    scene.spend(Phase.VERIFY, 4)
    assert scene.times.end_step() == (4, 1)
    assert times_of(scene) == {"draft_s": 2, "verify_s": 4, "host_s": 1}


def test_drafts_that_came_while_a_step_was_computed_cost_no_time(scene):
    scene.spend(Phase.SAMPLE, 5)
    scene.times.count_answer(3)
    scene.spend(Phase.SAMPLE, 1)
    scene.times.end_step()
    scene.spend(Phase.HOST, 2)
    scene.spend(Phase.VERIFY, 4)
    scene.times.end_step()
    assert times_of(scene) == {"verify_s": 4, "sample_s": 6, "host_s": 2}


def test_early_drafts_took_what_the_last_such_answer_reports(scene):
    for waited in (0, 3):
        scene.spend(Phase.HOST, 1 + waited)
        scene.times.see_drafts()
        scene.spend(Phase.SAMPLE, 2)  # the device computes
        scene.times.count_answer(2.5, is_behind=True)
        scene.spend(Phase.VERIFY, 0)
        scene.spend(Phase.SAMPLE, 4)
        scene.times.end_step()
    assert times_of(scene) == {"draft_s": 2.5, "sample_s": 12, "host_s": 2.5}  # the first drafts' time was unknown


def test_each_step_is_split_by_its_own_answers(scene):
    scene.step(waited=5, computed=3)
    scene.step(waited=5, computed=7)
    assert (times_of(scene)["draft_s"], times_of(scene)["wire_s"]) == (8, 2)


def test_of_several_drafters_the_slowest_counts(scene):
    scene.times.count_answer(1)
    scene.step(waited=5, computed=4)
    scene.times.count_answer(2)
    scene.step(waited=5, computed=1)
    assert (times_of(scene)["draft_s"], times_of(scene)["wire_s"]) == (6, 4)


@pytest.mark.parametrize("computed", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_counts_for_nothing(scene, computed):
    scene.times.count_answer(computed)
    scene.step(waited=5, computed=3)
    assert (times_of(scene)["draft_s"], times_of(scene)["wire_s"]) == (3, 2)


def test_the_histogram_has_each_step_in_every_phase(scene):
    for waited, computed in ((5, 3), (1, 3), (0, 0)):
        scene.step(waited, computed)
    phases = ("draft", "wire", "verify", "sample", "host")
    observed = {
        (sample.name.removeprefix("draftwire_step_time_seconds_"), sample.labels["phase"]): sample.value
        for sample in scene.times.histogram.collect().samples
    }
    assert [observed["count", phase] for phase in phases] == [3] * 5
    assert {f"{phase}_s": observed["sum", phase] for phase in phases} == times_of(scene)
    assert observed["sum", "wire"] == 2


class Mark:
    """A GPU event that was passed at a time in seconds."""

    def __init__(self, passed: float) -> None:
        self.passed = passed

    def elapsed_time(self, later: Mark) -> float:
        return 1000 * (later.passed - self.passed)


def test_on_a_gpu_the_host_has_the_devices_idle_time(scene):
    scene.spend(Phase.HOST, 2)
    scene.spend(Phase.VERIFY, 1)  # launched; the GPU computes while the host continues
    scene.spend(Phase.SAMPLE, 6)
    assert scene.times.end_step(StepMarks(*map(Mark, (10.0, 15.5, 16.0)))) == (6.0, 3.0)
    assert times_of(scene) == {"verify_s": 5.5, "sample_s": 0.5, "host_s": 3.0}
    scene.spend(Phase.HOST, 1)  # the next step was computed ahead, mostly before the host took the last step's tokens
    scene.times.end_step(StepMarks(*map(Mark, (16.0, 21.5, 22.0))))
    assert times_of(scene) == {"verify_s": 6.5, "sample_s": 0.5, "host_s": 3.0}


def test_idle_time_counts_while_it_lasts(scene):
    scene.spend(Phase.IDLE, 50)
    assert scene.times.read().times.idle_s == 50


def test_steps_and_rows_add_up(scene):
    scene.times.count_step(prompt_rows=7, verify_steps=0, verify_rows=0)
    scene.times.count_step(prompt_rows=2, verify_steps=3, verify_rows=11)
    read = scene.times.read()
    assert (read.steps, read.prompt_rows, read.verify_steps, read.verify_rows) == (2, 9, 3, 11)


def test_traffic_is_counted_for_each_carrier(scene):
    scene.times.count_sent(draft_pb2.CARRIER_BYTES, feature_rows=5, feature_bytes=120)
    scene.times.count_sent(draft_pb2.CARRIER_BYTES, feature_rows=1, feature_bytes=24)
    scene.times.count_logits(draft_pb2.CARRIER_BYTES, 64)
    (traffic,) = scene.times.read().traffic
    assert traffic.carrier == draft_pb2.CARRIER_BYTES
    assert (traffic.steps, traffic.feature_rows, traffic.feature_bytes, traffic.logits_bytes) == (2, 6, 144, 64)


def test_a_bucket_has_the_steps_up_to_its_bound_the_last_all():
    histogram = StepHistogram(["verify"])
    for seconds in (0.001, 0.0035, 10.0035):  # steps of 1 ms, 2.5 ms and 10 s
        histogram.observe({"verify": seconds})
    counts = {sample.labels["le"]: sample.value for sample in histogram.collect().samples if "le" in sample.labels}
    assert [counts[bound] for bound in ("0.0005", "0.001", "0.005", "5.0", "+Inf")] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("late", [0.0, 2.5])
def test_a_step_that_is_counted_late_has_no_time_of_the_next_one(scene, late):
    """Every other step is counted `late` seconds after the next step has begun."""
    for i in range(4):
        begin = scene.clock.now + 1
        scene.spend(Phase.WAIT, 0.75)
        scene.spend(Phase.HOST, 0.25)
        scene.spend(Phase.VERIFY, late)
        if i % 2:  # the step before
            scene.times.end_step(StepMarks(*map(Mark, (begin - 4.25, begin - 1.25, begin - 1))))
        scene.spend(Phase.SAMPLE, 3.25 - late)
        scene.times.finish_step()
        if i % 2:
            scene.times.end_step(StepMarks(*map(Mark, (begin, begin + 3, begin + 3.25))))
    assert times_of(scene) == pytest.approx({"wire_s": 3, "verify_s": 12, "sample_s": 1, "host_s": 1})
