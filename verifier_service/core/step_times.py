"""Time of the engine by phase, and counters of computed and sent rows, since the start."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import NamedTuple

import torch

from draftwire.server.step_histogram import StepHistogram
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2, generate_pb2


class Phase(IntEnum):
    """Phase of the engine's thread; integers, because each step uses phases as keys about twenty times."""

    IDLE = auto()  # no request to compute
    WAIT = auto()  # waiting for drafts while no step is computed
    HOST = auto()  # scheduling, inputs, features for the drafters, output; also while a drafter computes
    VERIFY = auto()  # the target's forward pass; on a GPU its launch
    SAMPLE = auto()  # from logits to the step's tokens on the host; on a GPU the wait for both


@dataclass
class _StepSeconds:
    """Seconds of the engine's thread since the previous step was finished."""

    phases: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    drafting: float = 0.0  # a drafter computed the next drafts while no step ran


class StepMarks(NamedTuple):
    """Events of a step on a GPU's stream; all have passed when the host has the step's tokens."""

    began: torch.cuda.Event  # start of the forward pass
    computed: torch.cuda.Event  # logits computed
    drawn: torch.cuda.Event  # tokens drawn


class StepTimes:
    """Counts of the engine's steps and the time of its thread by phase.

    The engine's thread calls all methods but `read`. On a GPU, VERIFY and SAMPLE are the device's times between the
    step's marks, within the time from the end of one step to the end of the next. From one step's tokens to the next
    step's forward pass, the time of computing drafts counts as the drafter's, even if the thread has other work
    meanwhile. The rest of the wait for drafts counts as the wire's. HOST is the remaining time, when both devices were
    idle.

    Attributes:
        histogram: Times of the steps by phase.
        traffic: Bytes to and from drafters; this object counts only tensors in shared memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a read between two updates would show a falling counter
        self._phase = Phase.IDLE
        self._since = clock()
        self._step = _StepSeconds()
        self._finished: _StepSeconds | None = None  # the finished step that is not counted yet
        self._finished_at = self._since
        self._seconds = dict.fromkeys(Phase, 0.0)  # of counted steps, without waits, which are split
        self._draft_s = self._wire_s = 0.0
        self._drafts_at = -math.inf  # time at which the next step's last drafts arrived
        self._drafting_s = 0.0  # seconds of the slowest drafter for them
        self._early_drafting_s = 0.0  # estimate of the next early drafts: seconds of the last ones
        self.histogram = StepHistogram(("draft", "wire", "verify", "sample", "host"))
        self.traffic = Traffic()
        self._steps = self._prompt_rows = self._verify_steps = self._verify_rows = 0
        self._carriers: defaultdict[draft_pb2.Carrier, generate_pb2.CarrierTraffic] = defaultdict(
            generate_pb2.CarrierTraffic
        )

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another, or the same again."""
        now = self._clock()
        elapsed = now - self._since
        with self._lock:
            left, self._phase, self._since = self._phase, phase, now
            times = self._seconds if left is Phase.IDLE else self._step.phases
            times[left] += elapsed
        if phase is Phase.VERIFY:
            self._step.drafting += max(0.0, min(self._drafting_s, self._drafts_at - self._finished_at))
            self._drafting_s = 0.0

    def finish_step(self) -> None:
        """Finish the step, whose tokens the host has: the thread's later time belongs to the next step."""
        self.enter(Phase.HOST)
        self._finished, self._step, self._finished_at = self._step, _StepSeconds(), self._since

    def end_step(self, marks: StepMarks | None = None) -> tuple[float, float]:
        """Count the step that was finished, or finish it now; on a GPU with the step's marks, unless the step failed.
        Call before the next step is finished.

        Returns:
            Seconds of the step (VERIFY and SAMPLE), and of HOST before it.
        """
        if self._finished is None:
            self.finish_step()
        step, self._finished = self._finished, None
        assert step is not None
        verify_s, sample_s = step.phases[Phase.VERIFY], step.phases[Phase.SAMPLE]
        total_s = step.phases[Phase.HOST] + verify_s + sample_s
        if marks is not None:
            verify_s = min(marks.began.elapsed_time(marks.computed) / 1000, total_s)
            sample_s = min(marks.computed.elapsed_time(marks.drawn) / 1000, total_s - verify_s)
        host_s = total_s - verify_s - sample_s
        wait_s = step.phases[Phase.WAIT]
        draft_s = min(step.drafting, wait_s + host_s)
        host_s -= max(0.0, draft_s - wait_s)
        with self._lock:
            self._draft_s += draft_s
            self._wire_s += max(0.0, wait_s - draft_s)
            self._seconds[Phase.VERIFY] += verify_s
            self._seconds[Phase.SAMPLE] += sample_s
            self._seconds[Phase.HOST] += host_s
        self.histogram.observe(
            {
                "draft": self._draft_s,
                "wire": self._wire_s,
                "verify": self._seconds[Phase.VERIFY],
                "sample": self._seconds[Phase.SAMPLE],
                "host": self._seconds[Phase.HOST],
            }
        )
        return verify_s + sample_s, host_s

    def count_step(self, *, prompt_rows: int, verify_steps: int, verify_rows: int) -> None:
        """Count a forward pass: rows of prompts, decoding requests, and the rows of these, drafts included."""
        self._steps += 1
        self._prompt_rows += prompt_rows
        self._verify_steps += verify_steps
        self._verify_rows += verify_rows

    def count_sent(self, carrier: draft_pb2.Carrier, feature_rows: int, feature_bytes: int) -> None:
        """Count a step sent to a drafter."""
        counts = self._carriers[carrier]
        counts.steps += 1
        counts.feature_rows += feature_rows
        counts.feature_bytes += feature_bytes
        self.traffic.count_tensor(carrier, "sent", "features", feature_bytes)

    def count_answer(self, compute_time_s: float, *, is_behind: bool = False) -> None:
        """Count a drafter's answer with its declared seconds of computation. With `is_behind` the step of its early
        drafts had already begun; the seconds are then the estimate for the next early drafts."""
        if not 0 <= compute_time_s < math.inf:
            return
        if is_behind:
            self._early_drafting_s = compute_time_s
        else:
            self._drafts_at, self._drafting_s = self._clock(), max(self._drafting_s, compute_time_s)

    def see_drafts(self) -> None:
        """Count early drafts, which arrived before their answer."""
        self._drafts_at, self._drafting_s = self._clock(), max(self._drafting_s, self._early_drafting_s)

    def count_logits(self, carrier: draft_pb2.Carrier, num_bytes: int) -> None:
        """Count draft logits of a drafter."""
        self._carriers[carrier].logits_bytes += num_bytes
        self.traffic.count_tensor(carrier, "received", "logits", num_bytes)

    def read(self) -> generate_pb2.EngineCounters:
        """Return the counters so far; thread-safe. A running step counts with its rows and no time."""
        with self._lock:
            seconds, draft_s, wire_s = self._seconds.copy(), self._draft_s, self._wire_s
            if self._phase is Phase.IDLE:  # an idle phase may last for hours and must be counted as it passes
                seconds[Phase.IDLE] += self._clock() - self._since
        traffic = []
        for carrier, counts in list(self._carriers.items()):
            traffic.append(generate_pb2.CarrierTraffic(carrier=carrier))
            traffic[-1].MergeFrom(counts)
        return generate_pb2.EngineCounters(
            steps=self._steps,
            prompt_rows=self._prompt_rows,
            verify_steps=self._verify_steps,
            verify_rows=self._verify_rows,
            times=generate_pb2.PhaseTimes(
                draft_s=draft_s,
                wire_s=wire_s,
                verify_s=seconds[Phase.VERIFY],
                sample_s=seconds[Phase.SAMPLE],
                host_s=seconds[Phase.HOST],
                idle_s=seconds[Phase.IDLE],
            ),
            traffic=traffic,
        )
