"""The verifier's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwire.server.metrics import with_model_name
from draftwire.v1 import generate_pb2
from verifier_service.drafters.fallbacks import cause_name
from verifier_service.engine.engine import Engine

_STATES = {
    number: name.removeprefix("DRAFTER_STATE_").lower() for name, number in generate_pb2.DrafterState.items() if number
}
_CAUSES = [
    name.removeprefix("FALLBACK_CAUSE_").lower() for name, number in generate_pb2.FallbackCause.items() if number
]


Family = GaugeMetricFamily | CounterMetricFamily
_PREFIX = "draftwire_"
# Metrics of vLLM's V1 engine that a verifier serves with the same unit, labels and meaning; see docs/operations.md.
_VLLM_METRICS = (
    *("num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
)


# Metrics of each drafter: kind, name, documentation, and value, None for no value.
_DRAFTER_METRICS: tuple[tuple[type[Family], str, str, Callable[[generate_pb2.DrafterStatus], float | None]], ...] = (
    (GaugeMetricFamily, "draftwire_drafter_sequences", "Sequences that use a drafter.", lambda one: one.sequences),
    (CounterMetricFamily, "draftwire_drafter_offered_tokens", "Drafts that arrived.", lambda one: one.offered),
    (CounterMetricFamily, "draftwire_drafter_draft_tokens", "Drafts that were verified.", lambda one: one.drafted),
    (CounterMetricFamily, "draftwire_drafter_accepted_tokens", "Drafts that were accepted.", lambda one: one.accepted),
    (
        CounterMetricFamily,
        "draftwire_drafter_expected_tokens",
        "Accepted drafts that the calibrated confidences of the verified drafts predict.",
        lambda one: one.expected,
    ),
    (
        GaugeMetricFamily,
        "draftwire_drafter_planned_drafts",
        "Drafts requested for each sequence in a step; 0 if decoding without drafts is faster.",
        lambda one: one.plan.num_drafts if one.HasField("plan") else None,
    ),
    (
        GaugeMetricFamily,
        "draftwire_drafter_expected_gain",
        "Highest throughput measured with drafts, relative to no drafts; 0 while either is unknown.",
        lambda one: one.plan.expected_gain if one.HasField("plan") else None,
    ),
)


class VerifierCollector(Collector):
    """Reads the state of a verifier at each scrape."""

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        drafters: Callable[[], Sequence[generate_pb2.DrafterStatus]],
        *,
        vllm_names: bool = False,
    ) -> None:
        """`vllm_names` serves vLLM's metrics a second time, under vLLM's names."""
        self._engine = engine
        self._model_name = model_name
        self._drafters = drafters
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        for metric in with_model_name(self._collect(), self._model_name):
            yield metric
            if self._vllm_names and metric.name.removeprefix(_PREFIX) in _VLLM_METRICS:
                yield _with_vllm_name(metric)

    def _collect(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler = engine.scheduler
        yield GaugeMetricFamily("draftwire_num_requests_running", "Running requests.", value=len(scheduler.running))
        yield GaugeMetricFamily("draftwire_num_requests_waiting", "Queued requests.", value=len(scheduler.waiting))
        yield GaugeMetricFamily(
            "draftwire_kv_cache_usage_perc", "Share of the cache blocks in use, 1 for all.", value=engine.kv_cache_usage
        )
        yield CounterMetricFamily(
            "draftwire_prefix_cache_queries",
            "Tokens of requests looked up in the prefix cache.",
            value=scheduler.prefix_cache_queries,
        )
        yield CounterMetricFamily(
            "draftwire_prefix_cache_hits", "Prompt tokens found in the prefix cache.", value=scheduler.prefix_cache_hits
        )
        yield from engine.metrics.collect()
        yield engine.times.histogram.collect()
        yield engine.times.traffic.collect()
        yield from _counters(engine.counters())
        yield from self._pool()

    def _pool(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "draftwire_drafter_state", "1 for the present state of a drafter.", labels=["drafter", "state"]
        )
        families = [kind(name, text, labels=["drafter"]) for kind, name, text, _ in _DRAFTER_METRICS]
        for drafter in self._drafters():
            self._engine.drafting.describe(drafter)
            for number, name in _STATES.items():
                state.add_metric([drafter.address, name], float(drafter.state == number))
            for family, (*_, value) in zip(families, _DRAFTER_METRICS, strict=True):
                if (present := value(drafter)) is not None:
                    family.add_metric([drafter.address], present)
        yield state
        yield from families
        yield GaugeMetricFamily(
            "draftwire_verification_budget",
            "Drafts that fit into the last step with drafts; -1 if all are verified.",
            value=self._engine.drafting.budget.budget.last_limit,
        )


def _with_vllm_name(metric: Metric) -> Metric:
    renamed = Metric(_vllm_name(metric.name), metric.documentation, metric.type)
    renamed.samples = [sample._replace(name=_vllm_name(sample.name)) for sample in metric.samples]
    return renamed


def _vllm_name(name: str) -> str:
    return f"vllm:{name.removeprefix(_PREFIX)}"


def _counters(counters: generate_pb2.EngineCounters) -> Iterator[Metric]:
    yield CounterMetricFamily("draftwire_verify_rows", "Rows of decoding requests.", value=counters.verify_rows)
    yield CounterMetricFamily("draftwire_prompt_rows", "Rows of prompts computed.", value=counters.prompt_rows)
    yield CounterMetricFamily("draftwire_num_preemptions", "Preemptions of requests.", value=counters.preemptions)
    yield CounterMetricFamily(
        "draftwire_idle_seconds", "Time of the engine's thread without a request.", value=counters.times.idle_s
    )
    fallbacks = CounterMetricFamily(
        "draftwire_fallback_tokens", "Tokens that verify steps emitted without drafts.", labels=["cause"]
    )
    tokens = {cause_name(fallback.cause): fallback.tokens for fallback in counters.fallbacks}
    for name in _CAUSES:
        fallbacks.add_metric([name], tokens.get(name, 0))
    yield fallbacks
