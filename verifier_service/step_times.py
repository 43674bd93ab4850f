"""Where the engine's time goes and what it has computed and sent: counters, which are read twice and subtracted."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum, auto

import torch

from draftwire.step_histogram import StepHistogram
from draftwire.traffic import Traffic
from draftwire.v1 import draft_pb2, generate_pb2


class Phase(IntEnum):
    """What the engine's thread is doing. Numbers, for each step looks phases up some twenty times."""

    IDLE = auto()  # no request to compute
    WAIT = auto()  # for drafts
    HOST = auto()  # scheduling, inputs, features for the drafters, output
    VERIFY = auto()  # the target's forward pass
    SAMPLE = auto()  # from logits to the step's tokens on the host


class StepTimes:
    """Counts of the engine's steps and the time of its thread by phase.

    The engine's thread calls everything but `read`. On a GPU a forward pass is only launched during VERIFY, and the
    thread waits for it during SAMPLE; two events on the stream tell them apart, read when the step's tokens are there.

    Attributes
    ----------
    histogram
        Times of the steps by phase.
    traffic
        Bytes to and from drafters, of which only tensors in shared memory are counted here.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a reader between the fields of IDLE would show a counter that falls
        self._phase = Phase.IDLE
        self._since = clock()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._draft_s = 0.0
        self._wire_s = 0.0
        self._waited_s = 0.0  # for the drafts of the next step
        self._computed_s = 0.0  # by the drafter that took longest for them
        self._verify_s = 0.0  # of the thread, in this step
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.histogram = StepHistogram(("draft", "wire", "verify", "sample", "host"))
        self.traffic = Traffic()
        self._steps = self._prompt_rows = self._verify_steps = self._verify_rows = 0
        self._carriers: defaultdict[draft_pb2.Carrier, generate_pb2.CarrierTraffic] = defaultdict(
            generate_pb2.CarrierTraffic
        )

    def enter(self, phase: Phase) -> None:
        """Ends the current phase and begins another, or the same again."""
        with self._lock:
            now = self._clock()
            elapsed = now - self._since
            left, self._phase, self._since = self._phase, phase, now
            self._seconds[left] += elapsed
        if left is Phase.WAIT:
            self._waited_s += elapsed
        elif left is Phase.VERIFY:
            self._verify_s = elapsed
        elif left is Phase.SAMPLE:
            self._settle(elapsed)
        if phase is Phase.VERIFY:
            self._split_wait()
        if self._events is not None and phase in (Phase.VERIFY, Phase.SAMPLE):
            self._events[phase is Phase.SAMPLE].record()

    def _split_wait(self) -> None:
        """The wait for this step's drafts is the drafter's up to what it computed, the wire's beyond."""
        draft_s = min(self._waited_s, self._computed_s)
        self._draft_s += draft_s
        self._wire_s += self._waited_s - draft_s
        self._waited_s = self._computed_s = 0.0

    def _settle(self, sample_s: float) -> None:
        """Moves the time for which the thread waited in SAMPLE for the forward pass to VERIFY."""
        if self._events is None or not self._events[1].query():
            return
        late_s = self._events[0].elapsed_time(self._events[1]) / 1000 - self._verify_s
        late_s = min(max(late_s, -self._verify_s), sample_s)
        self._seconds[Phase.VERIFY] += late_s
        self._seconds[Phase.SAMPLE] -= late_s

    @property
    def busy_s(self) -> float:
        """Time of the thread for steps so far, waits for drafts and for requests left out; at the end of a phase."""
        return self._seconds[Phase.HOST] + self._seconds[Phase.VERIFY] + self._seconds[Phase.SAMPLE]

    def count_step(self, *, prompt_rows: int, verify_steps: int, verify_rows: int) -> None:
        """Counts a forward pass: rows of prompts, decoding requests, and the rows of these, drafts included."""
        self._steps += 1
        self._prompt_rows += prompt_rows
        self._verify_steps += verify_steps
        self._verify_rows += verify_rows

    def end_step(self) -> None:
        """Puts the time since the last step into the histogram; what is left of a step's HOST is the next one's."""
        self.enter(Phase.HOST)
        self.histogram.observe(
            {
                "draft": self._draft_s,
                "wire": self._wire_s,
                "verify": self._seconds[Phase.VERIFY],
                "sample": self._seconds[Phase.SAMPLE],
                "host": self._seconds[Phase.HOST],
            }
        )

    def count_sent(self, carrier: draft_pb2.Carrier, feature_rows: int, feature_bytes: int) -> None:
        """Counts a step sent to a drafter."""
        counts = self._carriers[carrier]
        counts.steps += 1
        counts.feature_rows += feature_rows
        counts.feature_bytes += feature_bytes
        self.traffic.count_tensor(carrier, "sent", "features", feature_bytes)

    def count_answer(self, compute_time_s: float) -> None:
        """Counts a drafter's answer, which took the drafter that time to compute."""
        self._computed_s = max(self._computed_s, compute_time_s)

    def count_logits(self, carrier: draft_pb2.Carrier, num_bytes: int) -> None:
        """Counts draft logits that a drafter has sent."""
        self._carriers[carrier].logits_bytes += num_bytes
        self.traffic.count_tensor(carrier, "received", "logits", num_bytes)

    def read(self) -> generate_pb2.EngineCounters:
        """The counters so far; from any thread. A step that runs may be counted in part."""
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
