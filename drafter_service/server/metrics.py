"""The drafter's Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drafter_service.engine.answer import Answer
from drafter_service.server.engine_thread import EngineState
from draftwire.server.metrics import with_model_name
from draftwire.server.step_histogram import StepHistogram
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb


class DrafterCollector(Collector):
    """Counts answers as the engine's thread delivers them, and reads its state at each scrape."""

    def __init__(
        self,
        head_name: str,
        state: Callable[[], EngineState],
        unanswered: Callable[[], int],
        step_times: StepHistogram,
        traffic: Traffic,
    ) -> None:
        """`unanswered` returns the number of received steps without an answer."""
        self._head_name = head_name
        self._state = state
        self._step_times = step_times
        self._unanswered = unanswered
        self._traffic = traffic
        self._compute_time = Histogram(
            "draftwire_draft_step_seconds",
            "Time in which the head computed a step.",
            buckets=(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
            registry=None,
        )
        self._draft_tokens = 0
        self._answers: dict[int, int] = {}
        self._failures = 0
        self._refused = 0

    def count_refused(self) -> None:
        """Count a refused call; on the event loop."""
        self._refused += 1

    def count(self, answer: Answer | Exception) -> None:
        """Count an answer, or a session that failed."""
        if isinstance(answer, Exception):
            self._failures += 1
            return
        self._compute_time.observe(answer.compute_time_s)
        self._draft_tokens += sum(answer.drafts.num_drafts)
        for status, count in Counter(answer.drafts.statuses).items():
            self._answers[status] = self._answers.get(status, 0) + count

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus; thread-safe."""
        return with_model_name(self._collect(), self._head_name)

    def _collect(self) -> Iterator[Metric]:
        state = self._state()
        load = state.load
        yield GaugeMetricFamily("draftwire_draft_sessions", "Verifiers connected.", value=load.sessions)
        yield GaugeMetricFamily("draftwire_draft_sequences", "Sequences open.", value=load.sequences)
        yield GaugeMetricFamily(
            "draftwire_kv_cache_usage_perc", "Share of the cache blocks in use, 1 for all.", value=load.kv_cache_usage
        )
        yield GaugeMetricFamily(
            "draftwire_draft_steps_unanswered", "Steps received but not answered.", value=self._unanswered()
        )
        yield GaugeMetricFamily(
            "draftwire_draft_rows_waiting", "Rows of steps that are not in a batch yet.", value=state.waiting_rows
        )
        yield CounterMetricFamily(
            "draftwire_draft_evictions", "Sequences that made room for another verifier's.", value=state.evictions
        )
        ahead = CounterMetricFamily(
            "draftwire_draft_batches_ahead",
            "Batches begun before their step, by whether a commit took them.",
            labels=["outcome"],
        )
        ahead.add_metric(["taken"], state.taken_ahead)
        ahead.add_metric(["wasted"], state.wasted_ahead)
        yield ahead
        yield CounterMetricFamily(
            "draftwire_idle_seconds", "Time of the engine's thread without a step.", value=state.idle_s
        )
        yield self._step_times.collect()
        yield self._traffic.collect()
        yield from self._compute_time.collect()
        yield CounterMetricFamily("draftwire_drafted_tokens", "Draft tokens answered.", value=self._draft_tokens)
        answers = CounterMetricFamily("draftwire_draft_answers", "Sequences answered.", labels=["status"])
        for status, count in list(self._answers.items()):
            name = pb.SequenceStatus.Name(pb.SequenceStatus.ValueType(status))
            answers.add_metric([name.removeprefix("SEQUENCE_STATUS_").lower()], count)
        yield answers
        yield CounterMetricFamily("draftwire_draft_session_failures", "Sessions that failed.", value=self._failures)
        yield CounterMetricFamily("draftwire_draft_calls_refused", "Calls refused.", value=self._refused)
