"""Where the time of the drafter's engine goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum, auto

from draftwire.server.step_histogram import StepHistogram


class Phase(IntEnum):
    """What the engine's thread is doing."""

    IDLE = auto()  # no step waits
    DECODE = auto()  # reading and checking steps, opening and closing sessions
    COMPUTE = auto()  # batches
    ANSWER = auto()  # handing answers over, sending those that go straight to the verifier, and counting them


class EngineTimes:
    """Time of the engine's thread by phase, seconds. That thread calls all but `read`, which any thread may call.

    Attributes
    ----------
    histogram
        Times of the steps by phase.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a reader between two of the fields would show a counter that falls
        self._phase = Phase.IDLE
        self._since = clock()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.histogram = StepHistogram(phase.name.lower() for phase in Phase if phase is not Phase.IDLE)

    @property
    def phase(self) -> Phase:
        """The current one."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Ends the current phase and begins another, or goes on with the same."""
        if phase is self._phase:
            return
        with self._lock:
            now = self._clock()
            self._seconds[self._phase] += now - self._since
            self._since, self._phase = now, phase

    def end_step(self) -> None:
        """Puts the time since the last step into the histogram."""
        self.histogram.observe({phase.name.lower(): seconds for phase, seconds in self.read().items()})

    def read(self) -> dict[Phase, float]:
        """Seconds of each phase so far, the one that lasts included."""
        with self._lock:
            seconds = self._seconds.copy()
            seconds[self._phase] += self._clock() - self._since
        return seconds
