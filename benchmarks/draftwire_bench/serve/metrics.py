"""Computes the reported figures from timelines and counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.load import Timeline

PHASES = ("draft", "wire", "verify", "sample", "host")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return mean and percentiles with linear interpolation; None without values."""
    given = np.fromiter(values, float)
    if not len(given):
        return None
    return Percentiles(float(given.mean()), *(float(p) for p in np.percentile(given, (50, 90, 99))))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of requests, in seconds."""

    first_token: Percentiles | None
    """Time from sending a request to its first token."""
    inter_token: Percentiles | None
    """Time between a request's messages; with drafts a message has several tokens."""
    per_output_token: Percentiles | None
    """Time after a request's first token, divided by the tokens after the first; percentiles over requests."""


def latencies(timelines: Sequence[Timeline]) -> Latencies:
    """Return the latencies of all requests."""
    return Latencies(
        first_token=percentiles(t.arrivals[0] - t.sent for t in timelines),
        inter_token=percentiles(later - earlier for t in timelines for earlier, later in pairwise(t.arrivals)),
        per_output_token=percentiles(
            (t.arrivals[-1] - t.arrivals[0]) / (sum(t.counts) - 1) for t in timelines if sum(t.counts) > 1
        ),
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Output tokens per second of all requests."""

    whole_run: float
    """From the first request sent to the last token received, including prompts."""
    steady: float | None
    """While all concurrent requests were decoding; None if they never were."""
    whole_run_s: float
    steady_s: float


def throughput(timelines: Sequence[Timeline], concurrency: int | None) -> Throughput:
    """Return the throughput; there is no steady state without `concurrency` (requests that arrive at a rate)."""
    seconds = max(t.arrivals[-1] for t in timelines) - min(t.sent for t in timelines)
    steady = [] if concurrency is None else steady_intervals(timelines, concurrency)
    steady_s = sum(end - begin for begin, end in steady)
    steady_tokens = sum(
        count
        for t in timelines
        for arrival, count in zip(t.arrivals, t.counts, strict=True)
        if any(begin < arrival <= end for begin, end in steady)
    )
    return Throughput(
        whole_run=sum(sum(t.counts) for t in timelines) / seconds,
        steady=steady_tokens / steady_s if steady_s else None,
        whole_run_s=seconds,
        steady_s=steady_s,
    )


def steady_intervals(timelines: Sequence[Timeline], concurrency: int) -> list[tuple[float, float]]:
    """Return the intervals in which `concurrency` requests were between their first and last tokens."""
    # At equal times, ends precede begins: the requests of a slot do not overlap.
    events = sorted([(t.arrivals[0], 1) for t in timelines] + [(t.arrivals[-1], -1) for t in timelines])
    intervals = []
    decoding = 0
    for (time, change), (next_time, _) in pairwise([*events, (events[-1][0], 0)]):
        decoding += change
        if decoding >= concurrency and next_time > time:
            intervals.append((time, next_time))
    return intervals


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over all verify steps of all requests."""

    verify_steps: int
    verify_tokens: int
    drafted: tuple[int, ...]  # at each draft position
    accepted: tuple[int, ...]

    @property
    def length(self) -> float | None:
        """Return the emitted tokens per verify step, including the bonus token."""
        return self.verify_tokens / self.verify_steps if self.verify_steps else None

    @property
    def rates(self) -> tuple[float, ...]:
        """Return accepted over drafted at each position."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))


def acceptance(timelines: Sequence[Timeline]) -> Acceptance:
    """Return the sums of the requests' statistics."""
    statistics = [t.statistics for t in timelines]
    return Acceptance(
        verify_steps=sum(s.verify_steps for s in statistics),
        verify_tokens=sum(s.verify_tokens for s in statistics),
        drafted=sums([s.drafted for s in statistics]),
        accepted=sums([s.accepted for s in statistics]),
    )


def sums(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sum at each position; requests with fewer drafts have fewer positions."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def difference(before: pb.EngineCounters, after: pb.EngineCounters) -> pb.EngineCounters:
    """Return the difference between two readings of an engine's counters."""
    result = pb.EngineCounters()
    for field in result.DESCRIPTOR.fields:
        if field.message_type is None:
            setattr(result, field.name, getattr(after, field.name) - getattr(before, field.name))
    for field in result.times.DESCRIPTOR.fields:
        setattr(result.times, field.name, getattr(after.times, field.name) - getattr(before.times, field.name))
    earlier = {traffic.carrier: traffic for traffic in before.traffic}
    for traffic in after.traffic:
        old = earlier.get(traffic.carrier, pb.CarrierTraffic())
        entry = pb.CarrierTraffic(carrier=traffic.carrier)
        for name in ("steps", "feature_rows", "feature_bytes", "logits_bytes"):
            setattr(entry, name, getattr(traffic, name) - getattr(old, name))
        if entry.steps:
            result.traffic.append(entry)
    fallbacks = {fallback.cause: fallback.tokens for fallback in before.fallbacks}
    for fallback in after.fallbacks:
        tokens = fallback.tokens - fallbacks.get(fallback.cause, 0)
        if tokens:
            result.fallbacks.add(cause=fallback.cause, tokens=tokens)
    return result


def step_seconds(counters: pb.EngineCounters) -> dict[str, float]:
    """Return the mean seconds of an engine step by phase."""
    return {phase: getattr(counters.times, f"{phase}_s") / max(counters.steps, 1) for phase in PHASES}


def steady_counters(
    readings: Sequence[tuple[float, pb.EngineCounters]], intervals: Sequence[tuple[float, float]]
) -> pb.EngineCounters | None:
    """Return the counters between the first and the last reading in the longest interval; None without steps."""
    begin, end = max(intervals, key=lambda interval: interval[1] - interval[0], default=(0.0, 0.0))
    within = [counters for time, counters in readings if begin <= time <= end]
    if len(within) < 2:
        return None
    counters = difference(within[0], within[-1])
    return counters if counters.steps else None
