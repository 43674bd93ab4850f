"""Throughput and latency of a verifier over levels of load, with drafting off and on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from draftwire.client import Client
from draftwire.client.request import Prompt
from draftwire.contract.client_security import LOOPBACK, ClientSecurity
from draftwire.contract.errors import BenchmarkError, InvalidArgumentError
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.counts import find_skipped
from draftwire_bench.serve.load import ClientLoad, ClientPool, Timeline
from draftwire_bench.serve.metrics import (
    Acceptance,
    Latencies,
    Throughput,
    acceptance,
    difference,
    latencies,
    steady_counters,
    steady_intervals,
    throughput,
)
from draftwire_bench.serve.workload import Level, Shape, in_slots
from draftwire_bench.services import wait_for_drafters

# Requests that one client process can handle without limiting the result.
REQUESTS_PER_CLIENT = 16


@dataclass(frozen=True)
class ServeOptions:
    """Options of a measurement."""

    levels: Sequence[Level]
    shape: Shape
    drafting: Sequence[bool] = (False, True)
    num_requests: int | None = None  # of each level; None for the level's default
    warmup_tokens: int = 16  # output tokens of the requests before each measurement; 0 for none
    client_processes: int | None = None
    allows_skipped: bool = False  # allow fewer drafts with synthetic acceptance


@dataclass(frozen=True)
class LevelResult:
    """One level of load with drafting on or off."""

    level: Level
    drafting: bool
    requests: int
    throughput: Throughput
    latencies: Latencies
    acceptance: Acceptance
    counters: pb.EngineCounters  # of the whole run
    steady_counters: pb.EngineCounters | None  # of a time in which all requests were decoding
    clients: Sequence[ClientLoad]
    problems: Sequence[str]  # work that was skipped or repeated

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput in the steady state, or of the whole run without one."""
        steady = self.throughput.steady
        return self.throughput.whole_run if steady is None else steady

    @property
    def requests_per_s(self) -> float:
        """Return the requests per second of the whole run."""
        return self.requests / self.throughput.whole_run_s

    @property
    def bytes_per_accepted_token(self) -> float | None:
        """Return the bytes of features and draft logits per accepted draft."""
        sent = sum(traffic.feature_bytes + traffic.logits_bytes for traffic in self.counters.traffic)
        accepted = sum(self.acceptance.accepted)
        return sent / accepted if accepted else None


class MeasurementInterrupted(KeyboardInterrupt):
    """Ctrl-C in a measurement, with the levels measured so far."""

    def __init__(self, info: pb.GetVerifierInfoResponse, results: list[LevelResult]) -> None:
        super().__init__()
        self.info, self.results = info, results


def measure(
    address: str,
    options: ServeOptions,
    prompts: Callable[[pb.GetVerifierInfoResponse], Iterator[Prompt]],
    announce: Callable[[str], object] = lambda _: None,
    security: ClientSecurity = LOOPBACK,
) -> tuple[pb.GetVerifierInfoResponse, list[LevelResult]]:
    """Run all levels against the verifier at `address`; return its description and the results.

    Args:
        address: HOST:PORT.
        options: The levels and requests to measure.
        prompts: Returns endless prompts for a verifier.
        announce: Called with a description of each level before it runs.
        security: Security settings of the clients' connections.

    Raises:
        InvalidArgumentError: If the verifier does not support a level.
        BenchmarkError: If a request fails, others use the verifier, or work was skipped with synthetic acceptance.
        MeasurementInterrupted: On Ctrl-C.
    """
    with Client(address, security) as client:
        info = wait_for_drafters(client)
        _check(info, options)
        source = prompts(info)
        with ClientPool(address, _num_clients(options), security) as pool:
            runner = _Runner(client, pool, info, options, source)
            results: list[LevelResult] = []
            try:
                for level in options.levels:
                    for drafting in options.drafting:
                        announce(f"{level} requests, drafting {'on' if drafting else 'off'}")
                        results.append(runner.run(level, drafting))
            except KeyboardInterrupt as error:
                raise MeasurementInterrupted(info, results) from error
        return client.info(), results


def _num_clients(options: ServeOptions) -> int:
    if options.client_processes is not None:
        return options.client_processes
    most = max(level.concurrency or level.default_requests for level in options.levels)
    return max(1, min(math.ceil(most / REQUESTS_PER_CLIENT), (os.cpu_count() or 1) // 2))


def _check(info: pb.GetVerifierInfoResponse, options: ServeOptions) -> None:
    if any(options.drafting) and not info.drafters:
        raise InvalidArgumentError("drafting", "on", f"{info.target} is served without drafters")
    most, asked = info.speculative_config.num_speculative_tokens, options.shape.num_speculative_tokens
    for number in asked if any(options.drafting) else ():
        if number is not None and number > most:
            raise InvalidArgumentError("num_speculative_tokens", number, f"the verifier drafts at most {most}")
    for level in options.levels:
        if level.concurrency is not None and level.concurrency > info.max_num_seqs:
            raise InvalidArgumentError(
                "concurrency", level.concurrency, f"the verifier runs at most {info.max_num_seqs} requests concurrently"
            )
        if options.num_requests is not None and options.num_requests < (level.concurrency or 1):
            raise InvalidArgumentError(
                "num_requests", options.num_requests, f"must be at least the concurrency, {level.concurrency}"
            )
    if len({drafter.feature_row_bytes for drafter in info.drafters}) > 1:
        raise BenchmarkError("the drafters use features of different sizes: measure one kind of head at a time")


class _Runner:
    def __init__(
        self,
        client: Client,
        pool: ClientPool,
        info: pb.GetVerifierInfoResponse,
        options: ServeOptions,
        prompts: Iterator[Prompt],
    ) -> None:
        self._client, self._pool, self._options, self._prompts = client, pool, options, prompts
        config = info.speculative_config
        self._k = config.num_speculative_tokens
        self._is_synthetic = config.rejection_sample_method == config_pb2.REJECTION_SAMPLE_METHOD_SYNTHETIC
        self._row_bytes = info.drafters[0].feature_row_bytes if info.drafters else 0
        self._num_sent = 0

    def run(self, level: Level, drafting: bool) -> LevelResult:
        """Warm up, measure and check one level."""
        options = self._options
        count = options.num_requests or level.default_requests
        if options.warmup_tokens:
            warm_up = Level(concurrency=min(count, level.concurrency or REQUESTS_PER_CLIENT))
            self._send(warm_up, drafting, warm_up.concurrency or 1, options.warmup_tokens)
        before = self._idle_counters()
        readings: list[tuple[float, pb.EngineCounters]] = []
        timelines, clients = self._send(
            level,
            drafting,
            count,
            options.shape.output_tokens,
            lambda: readings.append((time.monotonic(), self._client.info().counters)),
        )
        counters = difference(before, self._idle_counters())
        problems = find_skipped(timelines, self._k, options.shape.output_tokens, counters, self._row_bytes)
        if problems and self._is_synthetic and not options.allows_skipped:
            raise BenchmarkError(
                f"{level} requests, drafting {'on' if drafting else 'off'}: work was skipped or repeated, so the "
                f"result is not valid: {'; '.join(problems)}"
            )
        concurrency = level.concurrency
        intervals = [] if concurrency is None else steady_intervals(timelines, concurrency)
        return LevelResult(
            level=level,
            drafting=drafting,
            requests=count,
            throughput=throughput(timelines, concurrency),
            latencies=latencies(timelines),
            acceptance=acceptance(timelines),
            counters=counters,
            steady_counters=steady_counters(readings, intervals),
            clients=clients,
            problems=problems,
        )

    def _idle_counters(self) -> pb.EngineCounters:
        info = self._client.info()
        if info.requests_running or info.requests_waiting:
            raise BenchmarkError(
                f"the verifier has {info.requests_running + info.requests_waiting} requests of other clients: "
                "measure a verifier without other clients"
            )
        return info.counters

    def _send(
        self,
        level: Level,
        drafting: bool,
        count: int,
        max_tokens: int,
        on_poll: Callable[[], object] = lambda: None,
    ) -> tuple[list[Timeline], list[ClientLoad]]:
        shape = self._options.shape
        requests = [
            shape.request(prompt, self._num_sent + number, drafting=drafting, max_tokens=max_tokens)
            for number, prompt in enumerate(islice(self._prompts, count))
        ]
        self._num_sent += count
        return self._pool.run(in_slots(requests, level, shape.seed), on_poll)
