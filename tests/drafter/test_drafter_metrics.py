"""A drafter's Prometheus metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from harness import OK, Rows, Text, connect, make_engine, opened
from served import TIMEOUT_S, ServedDrafter, hello, step_message
from tiny_head import DRAFT_VOCAB, WIDTH, TinyHead

from drafter_service.engine.answer import Answer, Load
from drafter_service.engine.engine_times import EngineTimes, Phase
from drafter_service.server.engine_thread import EngineState
from drafter_service.server.metrics import DrafterCollector
from draftwire.contract.validation import DENSE, GUMBEL
from draftwire.server.step_histogram import StepHistogram
from draftwire.transport.traffic import Traffic
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb


def samples(collector: DrafterCollector) -> dict[str, float]:
    """Return the samples by name and label values, without the model's name."""
    return {
        " ".join([sample.name, *(value for name, value in sample.labels.items() if name != "model_name")]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def collector_of(traffic: Traffic | None = None) -> DrafterCollector:
    load = Load(sessions=2, sequences=3, kv_cache_usage=0.25)
    state = EngineState(load, 70, 5, taken_ahead=11, wasted_ahead=2, idle_s=4.0)
    return DrafterCollector("head", lambda: state, lambda: 6, StepHistogram(["compute"]), traffic or Traffic())


def test_answers_are_counted_by_drafts_and_status():
    collector = collector_of()
    answer = Answer(1)
    answer.compute_time_s = 0.003
    answer.add_sequences([1, 2], np.array([5, 6]), np.array([7, 8]))
    answer.add_drafts(np.array([4, 3]), np.zeros(7, np.int32))
    answer.add_failure(3, pb.SEQUENCE_STATUS_NO_CAPACITY)
    collector.count(answer)
    collector.count(RuntimeError("out of memory"))
    values = samples(collector)
    assert (values["draftwire_draft_sessions"], values["draftwire_draft_sequences"]) == (2, 3)
    assert values["draftwire_kv_cache_usage_perc"] == 0.25
    assert values["draftwire_drafted_tokens_total"] == 7
    assert values["draftwire_draft_answers_total ok"] == 2
    assert values["draftwire_draft_answers_total no_capacity"] == 1
    assert values["draftwire_draft_session_failures_total"] == 1
    assert values["draftwire_draft_step_seconds_count"] == 1
    assert values["draftwire_draft_step_seconds_sum"] == pytest.approx(0.003)


def test_queue_evictions_and_idle_time_are_the_engines():
    values = samples(collector_of())
    assert (values["draftwire_draft_steps_unanswered"], values["draftwire_draft_rows_waiting"]) == (6, 70)
    assert values["draftwire_draft_evictions_total"] == 5
    assert values["draftwire_idle_seconds_total"] == 4.0


def test_batches_begun_ahead_are_counted_by_outcome():
    values = samples(collector_of())
    assert values["draftwire_draft_batches_ahead_total taken"] == 11
    assert values["draftwire_draft_batches_ahead_total wasted"] == 2


def test_each_step_is_in_the_histogram_once_with_its_time():
    now = 10.0
    times = EngineTimes(lambda: now)
    for num_steps in (1, 2):
        for seconds, phase in ((0.25, Phase.DECODE), (0.5, Phase.COMPUTE), (2.0, Phase.ANSWER), (4.0, Phase.IDLE)):
            times.enter(phase)
            now += seconds
        times.end_step()
        observed = {
            (sample.name.removeprefix("draftwire_step_time_seconds_"), sample.labels["phase"]): sample.value
            for sample in times.histogram.collect().samples
        }
        assert [observed["sum", phase] / num_steps for phase in ("decode", "compute", "answer")] == [0.25, 0.5, 2.0]
        assert [observed["count", phase] for phase in ("decode", "compute", "answer")] == [num_steps] * 3
        assert ("count", "idle") not in observed


def test_time_goes_to_the_phase_that_lasts():
    now = 10.0
    times = EngineTimes(lambda: now)
    for seconds, phase in ((2.0, Phase.DECODE), (0.5, Phase.COMPUTE), (1.0, Phase.COMPUTE), (4.0, Phase.ANSWER)):
        now += seconds
        times.enter(phase)
    now += 0.25
    expected = {Phase.IDLE: 2.0, Phase.DECODE: 0.5, Phase.COMPUTE: 5.0, Phase.ANSWER: 0.25}
    assert times.read() == expected
    now += 0.25
    assert times.read() == expected | {Phase.ANSWER: 0.5}  # the current phase is included


def test_rows_wait_until_a_batch_takes_them(head: TinyHead):
    engine = make_engine(head, max_batch_rows=8, max_sessions=4)
    stream = connect(engine)
    stream.send([Rows(1, Text(1), 0, 20, 1)], [opened(1)])
    waiting = [engine.waiting_rows]
    while engine.has_work:
        engine.iterate()
        waiting.append(engine.waiting_rows)
    assert waiting == [20, 12, 4, 0]


def test_sequences_that_make_room_are_counted(head: TinyHead):
    engine = make_engine(head, max_num_seqs=4)
    flood, newcomer = connect(engine), connect(engine)
    ids = range(1, 6)
    flood.step([Rows(i, Text(i), 0, 5, 1) for i in ids], [opened(i) for i in ids])  # one more than fit
    assert engine.num_evictions == 0
    newcomer.step([Rows(i, Text(i), 0, 5, 1) for i in (1, 2)], [opened(1), opened(2)])
    assert engine.num_evictions == 2


def test_a_served_drafter_counts_what_a_stream_brings(drafter: ServedDrafter):
    config = {"draft_sample_method": GUMBEL, "draft_logits": config_pb2.DraftLogits(form=DENSE)}
    stream = drafter.stream()
    stream.ask(hello(config))
    before = samples(drafter.collector)
    answer = stream.ask(step_message(1, [Rows(1, Text(1), 0, 5, drafts=4)], new=[1])).drafts
    stream.ask(step_message(2, [Rows(1, Text(1), 5, 2, drafts=3)]))
    assert list(answer.statuses) == [OK]
    name = "draftwire_step_time_seconds"
    wait_for(drafter, lambda values: values[f"{name}_count compute"] == 2)  # a step ends after its answer is sent
    values = samples(drafter.collector)
    assert values["draftwire_wire_bytes_total grpc received features"] == 4 * (5 + 2) * WIDTH
    assert values["draftwire_wire_bytes_total grpc sent logits"] == 4 * (4 + 3) * DRAFT_VOCAB
    assert values["draftwire_draft_rows_waiting"] == 0
    for phase in ("decode", "compute", "answer"):
        assert values[f"{name}_sum {phase}"] > before[f"{name}_sum {phase}"]
    assert values[f"{name}_sum compute"] >= values["draftwire_draft_step_seconds_sum"] > 0
    stream.end()


def test_a_step_is_unanswered_until_its_answer_goes_out(drafter: ServedDrafter):
    stream = drafter.connect()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(TIMEOUT_S)

    drafter.engine.post(hold)
    assert held.wait(TIMEOUT_S)
    stream.send(step_message(1, [Rows(1, Text(1), 0, 5, drafts=4)], new=[1]))
    stream.send(step_message(2, [Rows(1, Text(1), 5, 2, drafts=3)]))
    wait_for_unanswered(drafter, 2)
    go_on.set()
    assert [stream.read().drafts.step_id for _ in range(2)] == [1, 2]
    wait_for_unanswered(drafter, 0)
    stream.end()


def wait_for_unanswered(drafter: ServedDrafter, count: int) -> None:
    wait_for(drafter, lambda values: values["draftwire_draft_steps_unanswered"] == count)


def wait_for(drafter: ServedDrafter, condition: Callable[[dict[str, float]], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(samples(drafter.collector)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
