"""What a verifier tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwire.v1 import draft_pb2, generate_pb2
from verifier_service.engine import Engine
from verifier_service.fallbacks import cause_name

_PHASES = ("draft", "wire", "verify", "sample", "host", "idle")
_STATES = {
    number: name.removeprefix("DRAFTER_STATE_").lower() for name, number in generate_pb2.DrafterState.items() if number
}
_CAUSES = [
    name.removeprefix("FALLBACK_CAUSE_").lower() for name, number in generate_pb2.FallbackCause.items() if number
]


class VerifierCollector(Collector):
    """Reads the state of a verifier at each scrape."""

    def __init__(self, engine: Engine, drafters: Callable[[], Sequence[generate_pb2.DrafterStatus]]) -> None:
        self._engine = engine
        self._drafters = drafters

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        engine = self._engine
        scheduler = engine.scheduler
        yield GaugeMetricFamily("draftwire_requests_running", "Requests computed.", value=len(scheduler.running))
        yield GaugeMetricFamily("draftwire_requests_waiting", "Requests in the queue.", value=len(scheduler.waiting))
        yield GaugeMetricFamily("draftwire_kv_cache_usage_ratio", "Cache blocks in use.", value=engine.kv_cache_usage)
        yield from engine.metrics.collect()
        yield from _counters(engine.counters())
        yield from self._pool()

    def _pool(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "draftwire_drafter_state", "1 for the state that a drafter is in.", labels=["drafter", "state"]
        )
        sequences = GaugeMetricFamily(
            "draftwire_drafter_sequences", "Sequences that draft at a drafter.", labels=["drafter"]
        )
        messages = CounterMetricFamily(
            "draftwire_drafter_message_bytes",
            "Messages exchanged with a drafter, bytes.",
            labels=["drafter", "direction"],
        )
        drafted = CounterMetricFamily(
            "draftwire_drafter_draft_tokens", "Drafts of a drafter that were verified.", labels=["drafter"]
        )
        accepted = CounterMetricFamily(
            "draftwire_drafter_accepted_tokens", "Drafts of a drafter that were accepted.", labels=["drafter"]
        )
        for drafter in self._drafters():
            self._engine.drafting.describe(drafter)
            for number, name in _STATES.items():
                state.add_metric([drafter.address, name], float(drafter.state == number))
            sequences.add_metric([drafter.address], drafter.sequences)
            drafted.add_metric([drafter.address], drafter.drafted)
            accepted.add_metric([drafter.address], drafter.accepted)
            messages.add_metric([drafter.address, "sent"], drafter.sent_message_bytes)
            messages.add_metric([drafter.address, "received"], drafter.received_message_bytes)
        yield from (state, sequences, drafted, accepted, messages)


def _counters(counters: generate_pb2.EngineCounters) -> Iterator[Metric]:
    yield CounterMetricFamily("draftwire_steps", "Forward passes of the target.", value=counters.steps)
    yield CounterMetricFamily(
        "draftwire_verify_steps", "Verify steps of all requests.", value=counters.verify_steps
    )
    yield CounterMetricFamily("draftwire_verify_rows", "Rows of decoding requests.", value=counters.verify_rows)
    yield CounterMetricFamily("draftwire_prompt_rows", "Rows of prompts computed.", value=counters.prompt_rows)
    yield CounterMetricFamily("draftwire_prefix_hit_rows", "Rows found in the cache.", value=counters.prefix_hit_rows)
    yield CounterMetricFamily(
        "draftwire_preemptions", "Requests that gave their blocks back.", value=counters.preemptions
    )
    seconds = CounterMetricFamily("draftwire_engine_seconds", "Time of the engine's thread.", labels=["phase"])
    for phase in _PHASES:
        seconds.add_metric([phase], getattr(counters.times, f"{phase}_s"))
    yield seconds
    wire = CounterMetricFamily(
        "draftwire_wire_bytes", "Tensors exchanged with drafters, bytes.", labels=["carrier", "tensor"]
    )
    for traffic in counters.traffic:
        carrier = draft_pb2.Carrier.Name(traffic.carrier).removeprefix("CARRIER_").lower()
        wire.add_metric([carrier, "features"], traffic.feature_bytes)
        wire.add_metric([carrier, "logits"], traffic.logits_bytes)
    yield wire
    fallbacks = CounterMetricFamily(
        "draftwire_fallback_tokens", "Tokens that verify steps emitted without drafts.", labels=["cause"]
    )
    tokens = {cause_name(fallback.cause): fallback.tokens for fallback in counters.fallbacks}
    for name in _CAUSES:
        fallbacks.add_metric([name], tokens.get(name, 0))
    yield fallbacks
