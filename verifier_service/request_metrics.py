"""Latencies and counts of requests, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from draftwire.v1 import generate_pb2
from verifier_service.fallbacks import Cause

END_REASONS = ("stop", "length", "cancelled", "refused", "error")


class RequestMetrics:
    """Latencies and counts of requests, observed by the engine's thread as output is handed out.

    Latencies are those that the engine sees, seconds: without the network to the client.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """`num_speculative_tokens` is the most drafts in a step."""
        self._first_token = Histogram(
            "draftwire_time_to_first_token_seconds",
            "Arrival of a request to its first token.",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
            registry=None,
        )
        self._token_interval = Histogram(
            "draftwire_inter_token_latency_seconds",
            "Time since a request's last output, over the tokens of the new one.",
            buckets=(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1),
            registry=None,
        )
        self._duration = Histogram(
            "draftwire_request_duration_seconds",
            "Arrival of a request to its last token.",
            buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300),
            registry=None,
        )
        self._ended = dict.fromkeys(END_REASONS, 0)
        self._prompt_tokens = self._output_tokens = 0
        # Verify steps by the number of their drafts and of those accepted.
        self._drafted = [0] * (num_speculative_tokens + 1)
        self._accepted = [0] * (num_speculative_tokens + 1)
        self._fallbacks: dict[Cause, int] = {}

    def count_step(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a verify step of one request."""
        self._drafted[num_drafts] += 1
        self._accepted[num_accepted] += 1

    def count_fallback(self, cause: Cause) -> None:
        """Counts a token that a verify step emitted without drafts."""
        self._fallbacks[cause] = self._fallbacks.get(cause, 0) + 1

    @property
    def num_accepted(self) -> int:
        """Drafts accepted in all verify steps."""
        return sum(count * steps for count, steps in enumerate(self._accepted))

    def fallbacks(self) -> list[generate_pb2.FallbackCount]:
        """Tokens without drafts by cause; from any thread."""
        counts = list(self._fallbacks.items())
        return [generate_pb2.FallbackCount(cause=cause, tokens=tokens) for cause, tokens in counts]

    def observe_first(self, since_arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """The first output of a request."""
        self._first_token.observe(since_arrival_s)
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens

    def observe_next(self, since_last_s: float, output_tokens: int) -> None:
        """Later output of a request."""
        self._token_interval.observe(since_last_s / max(output_tokens, 1))
        self._output_tokens += output_tokens

    def count_end(self, reason: str, duration_s: float) -> None:
        """The end of a request, for one of `END_REASONS`."""
        self._ended[reason] += 1
        self._duration.observe(duration_s)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus; from any thread."""
        for histogram in (self._first_token, self._token_interval, self._duration):
            yield from histogram.collect()
        ended = CounterMetricFamily("draftwire_requests", "Requests that have ended.", labels=["reason"])
        for reason, count in list(self._ended.items()):
            ended.add_metric([reason], count)
        yield ended
        yield CounterMetricFamily("draftwire_prompt_tokens", "Tokens of prompts.", value=self._prompt_tokens)
        yield CounterMetricFamily("draftwire_output_tokens", "Tokens generated.", value=self._output_tokens)
        yield _by_position("draftwire_draft_tokens", "Drafts verified, by their place in the step.", self._drafted)
        yield _by_position("draftwire_accepted_tokens", "Drafts accepted, by their place in the step.", self._accepted)
        yield self._acceptance_length()

    def _acceptance_length(self) -> HistogramMetricFamily:
        """A bucket for each number of tokens, 1 .. k + 1: the drafts accepted and the one that follows them."""
        steps = list(self._accepted)
        buckets = [(f"{float(tokens)}", sum(steps[:tokens])) for tokens in range(1, len(steps) + 1)]
        return HistogramMetricFamily(
            "draftwire_acceptance_length",
            "Tokens of a verify step of one request.",
            buckets=[*buckets, ("+Inf", sum(steps))],
            sum_value=sum((accepted + 1) * count for accepted, count in enumerate(steps)),
        )


def _by_position(name: str, text: str, steps_by_count: Sequence[int]) -> CounterMetricFamily:
    """Counts at each position, from the number of steps that reached each count."""
    family = CounterMetricFamily(name, text, labels=["position"])
    for position in range(len(steps_by_count) - 1):
        family.add_metric([str(position)], sum(steps_by_count[position + 1 :]))
    return family
