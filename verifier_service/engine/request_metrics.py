"""Latencies and counts of requests, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from draftwire.v1 import generate_pb2
from verifier_service.drafters.fallbacks import Cause

FINISHED_REASONS = ("stop", "length", "abort", "error")

# All bounds of vLLM, so that its alert rules work, and finer bounds where drafts need them.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class RequestMetrics:
    """Latencies and counts of requests, observed by the engine's thread at delivery.

    Latencies are in seconds, without the network to the client. Names, labels and meanings are vLLM's, if vLLM has the
    metric.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """`num_speculative_tokens` is the most drafts in a step."""
        self._first_token = Histogram(
            "draftwire_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=None,
        )
        self._token_interval = Histogram(
            "draftwire_inter_token_latency_seconds",
            "Time between two outputs of a request, each of one or more tokens.",
            buckets=_TOKEN_BUCKETS,
            registry=None,
        )
        self._output_token = Histogram(
            "draftwire_request_time_per_output_token_seconds",
            "Time from the first to the last token of a request, per token after the first.",
            buckets=_TOKEN_BUCKETS,
            registry=None,
        )
        self._duration = Histogram(
            "draftwire_e2e_request_latency_seconds",
            "Time from the arrival to the end of a request.",
            buckets=_REQUEST_BUCKETS,
            registry=None,
        )
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._refused = 0
        self._prompt_tokens = self._generation_tokens = 0
        # Verify steps by the number of their drafts and of those accepted.
        self._drafted = [0] * (num_speculative_tokens + 1)
        self._accepted = [0] * (num_speculative_tokens + 1)
        self._fallbacks: dict[Cause, int] = {}

    def count_step(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verify step of one request."""
        self._drafted[num_drafts] += 1
        self._accepted[num_accepted] += 1

    def count_fallback(self, cause: Cause) -> None:
        """Count a token that a verify step emitted without drafts."""
        self._fallbacks[cause] = self._fallbacks.get(cause, 0) + 1

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted drafts."""
        return _total(self._accepted)

    def fallbacks(self) -> list[generate_pb2.FallbackCount]:
        """Return the tokens without drafts by cause; from any thread."""
        counts = list(self._fallbacks.items())
        return [generate_pb2.FallbackCount(cause=cause, tokens=tokens) for cause, tokens in counts]

    def observe_first(self, since_arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """Observe the first output of a request."""
        self._first_token.observe(since_arrival_s)
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += output_tokens

    def observe_next(self, since_last_s: float, output_tokens: int) -> None:
        """Observe later output of a request."""
        self._token_interval.observe(since_last_s)
        self._generation_tokens += output_tokens

    def observe_decode(self, decode_s: float, output_tokens: int) -> None:
        """Observe the time from the first to the last token of a finished request."""
        if output_tokens > 1:
            self._output_token.observe(decode_s / (output_tokens - 1))

    def count_end(self, reason: str, duration_s: float) -> None:
        """Count the end of a request, for one of `FINISHED_REASONS`."""
        self._finished[reason] += 1
        self._duration.observe(duration_s)

    def count_refused(self) -> None:
        """Count a request refused because of a full queue."""
        self._refused += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus; thread-safe."""
        for histogram in (self._first_token, self._token_interval, self._output_token, self._duration):
            yield from histogram.collect()
        finished = CounterMetricFamily(
            "draftwire_request_success", "Requests that have ended, without refused ones.", labels=["finished_reason"]
        )
        for reason, count in list(self._finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield CounterMetricFamily("draftwire_requests_refused", "Requests refused.", value=self._refused)
        yield CounterMetricFamily("draftwire_prompt_tokens", "Tokens of prompts.", value=self._prompt_tokens)
        yield CounterMetricFamily("draftwire_generation_tokens", "Tokens generated.", value=self._generation_tokens)
        yield from self._spec_decode()
        yield self._acceptance_length()

    def _spec_decode(self) -> Iterator[Metric]:
        drafted, accepted = list(self._drafted), list(self._accepted)
        yield CounterMetricFamily(
            "draftwire_spec_decode_num_drafts", "Verify steps of a request with drafts.", value=sum(drafted[1:])
        )
        yield CounterMetricFamily("draftwire_spec_decode_num_draft_tokens", "Drafts verified.", value=_total(drafted))
        yield CounterMetricFamily(
            "draftwire_spec_decode_num_accepted_tokens", "Drafts accepted.", value=_total(accepted)
        )
        yield _by_position(
            "draftwire_spec_decode_num_draft_tokens_per_pos", "Drafts verified, by position in the step.", drafted
        )
        yield _by_position(
            "draftwire_spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position in the step.", accepted
        )

    def _acceptance_length(self) -> HistogramMetricFamily:
        """Return a bucket for each number of tokens, 1 .. k + 1: accepted drafts and one more token."""
        steps = list(self._accepted)
        buckets = [(f"{float(tokens)}", sum(steps[:tokens])) for tokens in range(1, len(steps) + 1)]
        return HistogramMetricFamily(
            "draftwire_acceptance_length",
            "Tokens of a verify step of one request.",
            buckets=[*buckets, ("+Inf", sum(steps))],
            sum_value=sum((accepted + 1) * count for accepted, count in enumerate(steps)),
        )


def _total(steps_by_count: Sequence[int]) -> int:
    return sum(count * steps for count, steps in enumerate(steps_by_count))


def _by_position(name: str, text: str, steps_by_count: Sequence[int]) -> CounterMetricFamily:
    """Return the counts at each position, from the number of steps that reached each count."""
    family = CounterMetricFamily(name, text, labels=["position"])
    for position in range(len(steps_by_count) - 1):
        family.add_metric([str(position)], sum(steps_by_count[position + 1 :]))
    return family
