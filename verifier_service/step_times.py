"""Where the engine's time goes and what it has computed and sent: counters, which are read twice and subtracted."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum, auto
from typing import NamedTuple

import torch

from draftwire.step_histogram import StepHistogram
from draftwire.traffic import Traffic
from draftwire.v1 import draft_pb2, generate_pb2


class Phase(IntEnum):
    """What the engine's thread is doing. Numbers, for each step looks phases up some twenty times."""

    IDLE = auto()  # no request to compute
    WAIT = auto()  # for drafts, while no step is computed
    HOST = auto()  # scheduling, inputs, features for the drafters, output
    VERIFY = auto()  # the target's forward pass; on a GPU its launch
    SAMPLE = auto()  # from logits to the step's tokens on the host; on a GPU the wait for both


class StepMarks(NamedTuple):
    """Events of a step on a GPU's stream, which has passed the last of them when the step's tokens are there."""

    began: torch.cuda.Event  # the forward pass
    computed: torch.cuda.Event  # the logits
    drawn: torch.cuda.Event


class StepTimes:
    """Counts of the engine's steps and the time of its thread by phase.

    The engine's thread calls everything but `read`. On a GPU the thread's own phases say nothing of what the device
    does meanwhile: of the time from the end of one step to the end of the next, waits for drafts left out, VERIFY and
    SAMPLE have what the device took between the step's marks, and HOST what is left, when the device had nothing to do.

    Attributes
    ----------
    histogram
        Times of the steps by phase.
    traffic
        Bytes to and from drafters, of which only tensors in shared memory are counted here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a reader between the fields would show a counter that falls
        self._phase = Phase.IDLE
        self._since = clock()
        self._own = dict.fromkeys(Phase, 0.0)  # of the thread since the last step landed
        self._landed: dict[Phase, float] | None = None  # of the step that has landed and is not counted yet
        self._seconds = dict.fromkeys(Phase, 0.0)  # until then
        self._draft_s = 0.0
        self._wire_s = 0.0
        self._waited_s = 0.0  # for the drafts of the next step
        self._computed_s = 0.0  # by the drafter that took longest for them
        self.histogram = StepHistogram(("draft", "wire", "verify", "sample", "host"))
        self.traffic = Traffic()
        self._steps = self._prompt_rows = self._verify_steps = self._verify_rows = 0
        self._carriers: defaultdict[draft_pb2.Carrier, generate_pb2.CarrierTraffic] = defaultdict(
            generate_pb2.CarrierTraffic
        )

    def enter(self, phase: Phase) -> None:
        """Ends the current phase and begins another, or the same again."""
        now = self._clock()
        elapsed = now - self._since
        with self._lock:
            left, self._phase, self._since = self._phase, phase, now
            times = self._seconds if left is Phase.IDLE else self._own
            times[left] += elapsed
        if left is Phase.WAIT:
            self._waited_s += elapsed
        if phase is Phase.VERIFY:
            self._split_wait()

    def _split_wait(self) -> None:
        """The wait for this step's drafts is the drafter's up to what it computed, the wire's beyond."""
        draft_s = min(self._waited_s, self._computed_s)
        self._draft_s += draft_s
        self._wire_s += self._waited_s - draft_s
        self._waited_s = self._computed_s = 0.0

    def land(self) -> None:
        """The step's tokens are there: what the thread does from here on is for the next one."""
        self.enter(Phase.HOST)
        self._landed, self._own = self._own, dict.fromkeys(Phase, 0.0)

    def end_step(self, marks: StepMarks | None = None) -> tuple[float, float]:
        """Counts the step that has landed, or else lands now; on a GPU with the step's marks, unless it failed. To be
        called before the next one lands.

        Returns
        -------
        tuple[float, float]
            Seconds that the step took, VERIFY and SAMPLE, and those of HOST, which went before it.
        """
        if self._landed is None:
            self.land()
        own, self._landed = self._landed, None
        assert own is not None
        verify_s, sample_s = own[Phase.VERIFY], own[Phase.SAMPLE]
        total_s = own[Phase.HOST] + verify_s + sample_s
        if marks is not None:
            verify_s = min(marks.began.elapsed_time(marks.computed) / 1000, total_s)
            sample_s = min(marks.computed.elapsed_time(marks.drawn) / 1000, total_s - verify_s)
        host_s = total_s - verify_s - sample_s
        with self._lock:
            self._seconds[Phase.WAIT] += own[Phase.WAIT]
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
        """Counts a forward pass: rows of prompts, decoding requests, and the rows of these, drafts included."""
        self._steps += 1
        self._prompt_rows += prompt_rows
        self._verify_steps += verify_steps
        self._verify_rows += verify_rows

    def count_sent(self, carrier: draft_pb2.Carrier, feature_rows: int, feature_bytes: int) -> None:
        """Counts a step sent to a drafter."""
        counts = self._carriers[carrier]
        counts.steps += 1
        counts.feature_rows += feature_rows
        counts.feature_bytes += feature_bytes
        self.traffic.count_tensor(carrier, "sent", "features", feature_bytes)

    def count_answer(self, compute_time_s: float) -> None:
        """Counts a drafter's answer, which took the drafter that time to compute, as it says."""
        if 0 <= compute_time_s < math.inf:
            self._computed_s = max(self._computed_s, compute_time_s)

    def count_logits(self, carrier: draft_pb2.Carrier, num_bytes: int) -> None:
        """Counts draft logits that a drafter has sent."""
        self._carriers[carrier].logits_bytes += num_bytes
        self.traffic.count_tensor(carrier, "received", "logits", num_bytes)

    def read(self) -> generate_pb2.EngineCounters:
        """The counters so far; from any thread. Of a step that runs the rows are counted, and no time."""
        with self._lock:
            seconds = self._seconds.copy()
            if self._phase is Phase.IDLE:  # it may last for hours, which must not come all at once
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
                draft_s=self._draft_s,
                wire_s=self._wire_s,
                verify_s=seconds[Phase.VERIFY],
                sample_s=seconds[Phase.SAMPLE],
                host_s=seconds[Phase.HOST],
                idle_s=seconds[Phase.IDLE],
            ),
            traffic=traffic,
        )
