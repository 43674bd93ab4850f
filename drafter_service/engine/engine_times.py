"""Time of the drafter's engine by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum, auto

from draftwire.server.step_histogram import StepHistogram


class Phase(IntEnum):
    """Phase of the engine's thread."""

    IDLE = auto()  # no step waits
    DECODE = auto()  # reading and checking steps, opening and closing sessions
    COMPUTE = auto()  # batches
    ANSWER = auto()  # delivering answers, sending those that use the channel, and counting


class EngineTimes:
    """Seconds of the engine's thread by phase. The thread calls all methods but `read`, which is thread-safe.

    Attributes:
        histogram: Times of the steps by phase.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a read between the two updates would show a falling counter
        self._phase = Phase.IDLE
        self._since = clock()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.histogram = StepHistogram(phase.name.lower() for phase in Phase if phase is not Phase.IDLE)

    @property
    def phase(self) -> Phase:
        """Return the current phase."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Begin a phase, unless it is the current one."""
        if phase is self._phase:
            return
        with self._lock:
            now = self._clock()
            self._seconds[self._phase] += now - self._since
            self._since, self._phase = now, phase

    def end_step(self) -> None:
        """Put the time since the last step into the histogram."""
        self.histogram.observe({phase.name.lower(): seconds for phase, seconds in self.read().items()})

    def read(self) -> dict[Phase, float]:
        """Return the seconds of each phase so far, the current phase included."""
        with self._lock:
            seconds = self._seconds.copy()
            seconds[self._phase] += self._clock() - self._since
        return seconds
