"""A GPU's stream that waits for the host: work is launched before its inputs exist."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from draftwire.transport.cuda_segment import cuda_driver

# Seconds after which the guard releases a held stream, because the releasing thread may wait for the device.
MOST_HELD_S = 0.5
_GUARD_INTERVAL_S = 0.1

WaitForValue = Callable[[int, int, int], None]  # stream, address, value


class StreamHold:
    """Stops the current stream of a device until it is released. Used by one thread.

    The stream waits for a word of pinned memory, which occupies no multiprocessor. Meanwhile the thread must not call
    anything that waits for the stream. In case the driver unexpectedly waits for the whole device, a guard thread
    releases the stream.

    Source: CUDA Driver API, "Stream Memory Operations".

    Attributes:
        word: The awaited word, int32 [1], pinned if the device is a GPU.
    """

    def __init__(self, device: torch.device, wait_for_value: WaitForValue | None = None) -> None:
        """`wait_for_value` replaces the driver's function in tests.

        Raises:
            SegmentError: If the driver lacks the function.
        """
        self._device = device
        self._wait_for_value = wait_for_value or cuda_driver().wait_for_value
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._view = self.word.numpy().view(np.uint32)
        self._value = 0
        self._since: float | None = None  # monotonic time at which the stream was stopped; None when it runs
        self._lock = threading.Lock()
        self._guard: threading.Thread | None = None

    def stop(self) -> None:
        """Let later work on the current stream wait for `release`."""
        if self._guard is None:
            self._guard = threading.Thread(target=self._watch, name="stream-hold", daemon=True)
            self._guard.start()
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        with self._lock:
            assert self._since is None
            self._value = (self._value + 1) % 2**32
            self._wait_for_value(stream, self.word.data_ptr(), self._value)
            self._since = time.monotonic()

    def release(self, fill: Callable[[], object]) -> bool:
        """Call `fill` to write the inputs, and let the stream continue. Return False if the guard has already released
        the stream, which makes the results invalid."""
        with self._lock:
            if self._since is None:
                return False
            fill()
            self._release()
            return True

    def _release(self) -> None:
        self._view[0] = self._value
        self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(_GUARD_INTERVAL_S)
            with self._lock:
                if self._since is not None and time.monotonic() - self._since > MOST_HELD_S:
                    self._release()
