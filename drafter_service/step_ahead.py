"""A draft step that is launched before its rows are there, and begins when they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from drafter_service.draft_loop import DraftLoop, LoopShape
from drafter_service.loop_graphs import LoopGraphs
from draftwire.stream_hold import StreamHold

# It is given up after so long: other threads may wait for the device.
PATIENCE_S = 0.05


class StepAhead:
    """Runs captured steps. After two of one shape it can launch a third before anybody has asked for it: what is left
    to be done for its rows is to bring them to the device.

    While one waits nothing else may be launched on the stream of the steps, or wait for it. One that is dropped
    computes padding.

    Attributes
    ----------
    until
        Monotonic time at which to drop the one that waits; infinite when none does.
    """

    def __init__(self, loop: DraftLoop, graphs: LoopGraphs, hold: StreamHold | None, device: torch.device) -> None:
        """Without a `hold` of the current stream, that of the steps, none is launched ahead."""
        self.until = math.inf
        self._loop = loop
        self._graphs = graphs
        self._hold = hold
        self._device = device
        # Brings the states, also while a step waits. On the CPU, where tests stand in for a device, are no streams.
        self._beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._waiting: LoopShape | None = None
        self._last: LoopShape | None = None
        self._is_even = False  # the last two had one shape
        self._is_dropped = False  # one may still read the inputs

    def launch(self) -> None:
        """Launches one like the last two; without effect where they differ, or one waits already."""
        shape = self._last
        if self._hold is None or shape is None or not self._is_even or self._waiting is not None:
            return
        self._loop.inputs.clear(shape.num_sequences, shape.num_rows)  # should nobody come in time
        self._hold.stop()
        try:
            self._graphs.replay(shape)
        except BaseException:
            self._hold.release(lambda: None)
            raise
        self._waiting, self.until = shape, time.monotonic() + PATIENCE_S

    def run(self, shape: LoopShape, load: Callable[[], np.ndarray], fill: Callable[[np.ndarray], None]) -> None:
        """Has a step computed. `load` copies its states to where they are read, on the current stream, and returns its
        tokens; `fill` writes these and its other inputs."""
        has_begun = False
        with torch.cuda.stream(self._beside):
            tokens = load()
            if self._hold is not None and self._waiting == shape:
                has_begun = self._hold.release(partial(fill, tokens), self._beside)
                self._waiting, self.until = None, math.inf
                self._is_dropped = not has_begun
        if not has_begun:
            self.free_inputs()
            if self._beside is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._beside)
            fill(tokens)
            self._graphs.replay(shape)
        self._is_even, self._last = shape == self._last, shape

    def drop(self) -> None:
        """Gives up the one that waits, and launches none before there have been two again."""
        shape, self._waiting, self.until = self._waiting, None, math.inf
        self._last, self._is_even = None, False
        if self._hold is not None and shape is not None:
            self._is_dropped = True
            self._hold.release(partial(self._loop.inputs.clear, shape.num_sequences, shape.num_rows))

    def free_inputs(self) -> None:
        """Drops what waits, and waits until it does not use the loop's inputs any more."""
        if self._waiting is not None:
            self.drop()
        if self._is_dropped and self._beside is not None:
            torch.cuda.current_stream(self._device).synchronize()
        self._is_dropped = False
