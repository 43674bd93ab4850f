"""A simulation of pacing with a fake clock: a verifier's steps, and a drafter behind a link."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import drafting_scene
import pytest
from drafting_scene import Clock, K, RecordedStream, Scene, answer_to, make_head

from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.drafters.drafting import Drafting
from verifier_service.drafters.stream import Answered, Stream
from verifier_service.engine.planner import Planner
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.step import Step
from verifier_service.pacing import Pace, backlog
from verifier_service.sampling.sampler import SamplerOutput

# Marks a case whose drafts gain less than its limit. A change that fixes the case must remove the mark.
KNOWN_LOSS = pytest.mark.xfail(raises=AssertionError, strict=True, reason="docs/decisions/024-pacing-far-drafters.md")

PROMPT_LENGTH = 32
OUTPUT_LENGTH = 200
CONFIG = {"num_speculative_tokens": 4}
STALLS_EVERY_S, STALLS_FOR_S = 1.56, 0.25


@dataclass
class Costs:
    """Costs in seconds; by default of an 8B model on an H200 with a nearby drafter."""

    step_s: float = 4.87e-3
    row_s: float = 6.5e-6
    trip_s: float = 0.2e-3
    feature_row_s: float = 8e-6  # time on the link: 8 KiB at 1 GB/s
    draft_s: float = 0.35e-3  # per draft position
    acceptance: float = 0.75
    accepted: int | None = None  # accepted drafts of each verify step, as with synthetic acceptance; None: random
    backlog_s: float = 0.0  # extra time of an answer to rows of a prompt or backlog, which have no CUDA graph
    launch_s: float = 0.0  # host time to launch a step while another is in flight; prelaunched steps cost none
    send_s: float = 0.0  # host time of a message that requests no drafts, before the next launch
    send_row_s: float = 0.0  # host time per row of a message
    stall_s: float = 0.0  # host stall before 30% of launches, during STALLS_FOR_S of each STALLS_EVERY_S
    noise: float = 0.0  # mean relative increase of each time, exponentially distributed


@dataclass
class Drafter:
    """A drafter that processes messages one by one; its link transfers them one by one."""

    costs: Costs
    world: World
    link_free: float = 0.0
    is_free: float = 0.0
    answers: list[tuple[float, pb.Drafts]] = field(default_factory=list)

    def take(self, step: pb.DraftStep) -> None:
        costs, noisy = self.costs, self.world.noisy
        self.world.clock.now += costs.send_s * (not any(step.num_drafts)) + costs.send_row_s * sum(step.num_rows)
        self.link_free = max(self.link_free, self.world.clock.now) + costs.feature_row_s * sum(step.num_rows)
        has_backlog = max(step.num_rows, default=0) > K + 2
        compute_s = noisy(self.draft_s(step) + costs.backlog_s * has_backlog)
        self.is_free = max(self.is_free, self.link_free + noisy(costs.trip_s / 2)) + compute_s
        answer = answer_to(step, [5] * 16)
        answer.compute_time_s = compute_s
        last = self.answers[-1][0] if self.answers else 0.0
        self.answers.append((max(last, self.is_free + noisy(costs.trip_s / 2)), answer))

    def draft_s(self, step: pb.DraftStep) -> float:
        """Return the seconds that the step's drafts take."""
        return self.costs.draft_s * max(step.num_drafts, default=0)


class World:
    """A verifier with `sequences` running requests; a new request replaces each ended one if `replaces` is true.

    As in the engine on a GPU, a step whose requests do not wait for drafts is launched while the previous step is in
    flight.

    `second`: costs of a second drafter; the target's costs are those of `costs`.
    """

    max_sequences = 100  # of each drafter
    drafter_type = Drafter

    def __init__(
        self,
        clock: Clock,
        sequences: int,
        costs: Costs | None = None,
        *,
        config: dict[str, Any] | None = None,
        deadline_s: float | None = 0.5,
        prompt_length: int = PROMPT_LENGTH,
        output_length: int = OUTPUT_LENGTH,
        replaces: bool = True,
        second: Costs | None = None,
        **request: Any,
    ) -> None:
        self.clock = clock
        self.costs = costs or Costs()
        self.scene = self._new_scene(config, deadline_s)
        self.drafting = self.scene.drafting
        self.drafters: dict[Stream, Drafter] = {}
        for drafter in [self.drafter_type(one, self) for one in (self.costs, second) if one is not None]:
            stream = self.scene.connect(max_sequences=self.max_sequences)
            stream.address = f"drafter:{1 + len(self.drafters)}"
            stream.on_send = drafter.take
            self.drafters[stream] = drafter
        self.scene.capture_every_row()  # tests of pacing do not check features, so none are computed
        self.tokens = 0
        self.prompt_length, self.output_length = prompt_length, output_length
        self.step_sizes: list[int] = []  # number of sequences of each step
        self.drafted: list[int] = []  # number of drafts of each sequence in each step
        self._replaces, self._request = replaces, request
        self.draw = random.Random(0)
        self._in_flight: Step | None = None
        self._in_flight_s = (0.0, 0.0, 0.0)  # time of its end, its duration, and the device's idle time before it
        self._planner = Planner(cast("Scheduler", self._new_places()), self.drafting, is_async=True)
        for _ in range(sequences):
            self.arrive()

    def _new_scene(self, config: dict[str, Any] | None, deadline_s: float | None) -> Scene:
        return Scene(config, deadline_s)

    def _new_places(self) -> Places:
        return Places(self.scene)

    def run(self, seconds: float) -> float:
        """Run for `seconds`, or until all requests have ended; return the tokens per second."""
        began, before = self.clock.now, self.tokens
        while self.clock.now < began + seconds and (self.scene.requests or self._in_flight is not None):
            self._deliver()
            self.drafting.placement.drop_lost()
            self.scene.flush()
            landing, (lands, took_s, host_s) = self._in_flight, self._in_flight_s
            step = self._planner.plan(landing)
            if landing is None and step is None:
                self._wait()
            elif landing and step is None and self.drafting.wait_policy.is_awaited and self.next_answer < lands:
                self.clock.now = self.next_answer
            else:
                self._in_flight = None if step is None else self._launch(step, lands)
                if landing is not None:
                    self._land(landing, lands, took_s, host_s)
        return (self.tokens - before) / (self.clock.now - began)

    @property
    def stream(self) -> RecordedStream:
        """Return the first drafter's stream."""
        return cast("RecordedStream", next(iter(self.drafters)))

    @property
    def drafter(self) -> Drafter:
        """Return the first drafter."""
        return self.drafters[self.stream]

    def _stream_of(self, request: Request) -> Stream | None:
        binding = self.drafting.placement.bindings.get(request)
        return None if binding is None else binding.session.stream

    def _acceptance(self, request: Request) -> float:
        stream = self._stream_of(request)
        costs = self.costs if stream is None else self.drafters[stream].costs
        return costs.acceptance

    def _accepted(self, request: Request, num_drafts: int) -> int:
        if self.costs.accepted is not None:
            return min(num_drafts, self.costs.accepted)
        accepted = 0
        while accepted < num_drafts and self.draw.random() < self._acceptance(request):
            accepted += 1
        return accepted

    @property
    def num_admissible(self) -> int:
        """Return the number of waiting requests that can be admitted."""
        return 0

    def rate_without(self) -> float:
        """Return the expected tokens per second of steps without drafts."""
        count = len(self.scene.requests)
        return count / (self.costs.step_s + count * self.costs.row_s) / (1 + self.costs.noise)

    def noisy(self, seconds: float) -> float:
        """Return `seconds` with noise."""
        return seconds * (1 + self.costs.noise * self.draw.expovariate(1))

    def arrive(self, prompt_length: int | None = None, **request: Any) -> None:
        """Add a running request whose prompt is computed."""
        prompt_length = prompt_length or self.prompt_length
        one = self.scene.admit(prompt_length, max_tokens=self.output_length, **{"k": K, **self._request, **request})
        one.num_computed = prompt_length
        one.tokens.append(9)

    def _deliver(self) -> None:
        for stream, drafter in self.drafters.items():
            answers = drafter.answers
            while answers and answers[0][0] <= self.clock.now:
                received, answer = answers.pop(0)
                self.drafting.handle(Answered(stream, answer, received))

    @property
    def next_answer(self) -> float:
        """Return the time of the next answer; infinite without one."""
        return min((one.answers[0][0] for one in self.drafters.values() if one.answers), default=math.inf)

    def _wait(self) -> None:
        deadline = self.drafting.next_deadline()
        until = self.next_answer if deadline is None else min(deadline, self.next_answer)
        self.clock.now = max(self.clock.now, until) + 1e-6

    def _seconds(self, rows: Sequence[ScheduledRows]) -> float:
        """Return the seconds of a step with these rows, and record the step."""
        counts = [one.num_drafts for one in rows]
        self.step_sizes.append(len(counts))
        self.drafted += counts
        return self.noisy(self.costs.step_s + self.costs.row_s * (sum(counts) + len(counts)))

    def _launch(self, step: Step, device_free: float) -> Step:
        works = step.rows
        sampling = [work for work in works if work.samples]
        for work in works:
            work.request.num_in_flight += 1
        seconds = self._seconds(works)
        self.clock.now += self.costs.launch_s * (self._in_flight is not None)
        if self.costs.stall_s and self.clock.now % STALLS_EVERY_S < STALLS_FOR_S and self.draw.random() < 0.3:
            self.clock.now += self.costs.stall_s * self.draw.uniform(0.5, 1.6)
        step.sampler_output = cast("SamplerOutput", SimpleNamespace(rows=sampling, first_tokens=()))
        step.is_beside = self._in_flight is not None
        begins = max(self.clock.now, device_free)
        self._in_flight_s = (begins + seconds, seconds, begins - device_free if step.is_beside else 0.0)
        return step

    def _land(self, step: Step, lands: float, took_s: float, host_s: float) -> None:
        self.clock.now = max(self.clock.now, lands)
        for work in step.rows:
            work.request.num_in_flight -= 1
        # Without requests that have ended.
        running = [work for work in step.rows if work.request in self.scene.requests]
        works = [work for work in running if work.is_decoding]
        requests, offered = [work.request for work in works], [work.offered for work in works]
        counts = [work.num_drafts for work in works]
        sessions = self.drafting.sessions
        streams = map(self._stream_of, requests)
        drafters = [None if stream is None else sessions[stream].pace.calibration for stream in streams]
        received = [0 if drafts is None else len(drafts.tokens) for drafts in offered]
        self.drafting.count_step(
            has_prompts=step.has_prompts or (self._in_flight is not None and self._in_flight.has_prompts),
            step_s=took_s,
            host_s=host_s,
            verified=Counter(zip(drafters, received, strict=True)),
            num_rows=sum(len(work.tokens) for work in running),
            num_prompt_rows=sum(len(work.tokens) for work in running if not work.is_decoding),
            num_waiting=self.num_admissible,
            landed=self.clock.now,
            is_beside=step.is_beside,
        )
        self._commit(requests, offered, counts)
        self._commit_prompts([work for work in running if not work.is_decoding])
        self.scene.flush()

    def _commit_prompts(self, rows: Sequence[ScheduledRows]) -> None:
        for one in rows:
            one.request.num_computed += len(one.tokens)
            if one.samples:
                one.request.tokens.append(9)
                self.tokens += 1

    def _commit(
        self, requests: Sequence[Request], offered: Sequence[ReadyDrafts | None], counts: Sequence[int]
    ) -> None:
        for one, drafts, count in zip(requests, offered, counts, strict=True):
            accepted = self._accepted(one, count)
            if drafts is not None:
                self.drafting.budget.count(one, drafts, count, accepted)
            emitted = min(accepted + 1, one.max_length - len(one.tokens))
            one.tokens += [*[5] * accepted, 9]
            one.num_computed += accepted + 1
            self.tokens += emitted
            if len(one.tokens) >= one.max_length:
                self.scene.end(one)
                self.scene.free(one)
                if self._replaces:
                    self.arrive()


class Places:
    """A fake scheduler in which all requests run and all prompts are computed."""

    may_admit = False

    def __init__(self, scene: Scene) -> None:
        self.running = scene.requests

    def schedule(
        self,
        is_ready: Callable[[Request], bool],
        following: Mapping[Request, int],
        *_: object,
        choose: Callable[[Sequence[Request]], Mapping[Request, int]],
        **__: object,
    ) -> list[ScheduledRows]:
        decoding = [
            one
            for one in self.running
            if (one in following or (one.is_decoding and not one.is_in_flight)) and is_ready(one)
        ]
        most = choose(decoding)
        return [self._rows(request, following.get(request), most.get(request, 0)) for request in decoding]

    def _rows(self, request: Request, follows: int | None, most: int) -> ScheduledRows:
        last = len(request.tokens) - (follows is None)
        offered, request.drafts = request.drafts, None
        drafts = offered.first(most) if offered is not None and most > 0 else None
        tokens = [9, *(drafts.tokens if drafts is not None else ())]
        return ScheduledRows(request, last, tokens, drafts, samples=True, follows=follows, offered=offered)


def adaptive(clock: Clock, sequences: int, costs: Costs) -> World:
    """Return a world whose requests have at most four drafts."""
    return World(clock, sequences, costs, config=CONFIG, k=4)


def pace_of(own: Drafting) -> Pace:
    """Return the pace of the only drafter."""
    (session,) = own.sessions.values()
    return session.pace


def use_rows_of_8b(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale limits in bytes, so that they hold as many rows as with the features of an 8B model."""
    row_bytes = make_head().row_bytes
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 20_000)
    for name, rows in (("LEAST_BYTES", 16), ("FIRST_BYTES", 192), ("MOST_BYTES", 2048)):
        monkeypatch.setattr(backlog, name, rows * row_bytes)
