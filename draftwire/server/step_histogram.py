"""Times of an engine's steps by phase, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

# Bounds in seconds: from one poll of an empty queue to the forward pass of a long prompt.
_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class StepHistogram:
    """Counts steps by the time of each phase. The engine's thread observes; any thread collects.

    It has no lock, and costs some microseconds a step.
    """

    def __init__(self, phases: Iterable[str]) -> None:
        # Phase -> steps up to each bound and beyond the last one, each step once.
        self._counts = {phase: [0] * (len(_BOUNDS) + 1) for phase in phases}
        self._seconds = dict.fromkeys(self._counts, 0.0)

    def observe(self, seconds: Mapping[str, float]) -> None:
        """Count a step that ends now. `seconds` are the total times of the phases so far; the step's are the
        differences to the last call."""
        for phase, counts in self._counts.items():
            counts[bisect_left(_BOUNDS, seconds[phase] - self._seconds[phase])] += 1
            self._seconds[phase] = seconds[phase]

    def collect(self) -> HistogramMetricFamily:
        """Yield the metrics for Prometheus."""
        family = HistogramMetricFamily(
            "draftwire_step_time_seconds", "Time of a step of the engine, by phase.", labels=["phase"]
        )
        for phase, counts in self._counts.items():
            sums = accumulate(counts.copy())
            buckets = [(str(bound), count) for bound, count in zip((*_BOUNDS, "+Inf"), sums, strict=True)]
            family.add_metric([phase], buckets, sum_value=self._seconds[phase])
        return family
