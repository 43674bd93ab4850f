"""A GPU's stream that waits for the host: work is launched before what it computes on is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from draftwire.transport.cuda_segment import cuda_driver

# A stream that was held for so long goes on by itself: the thread that is to release it may wait for the device.
MOST_HELD_S = 0.5
_LOOK_EVERY_S = 0.1

WaitForValue = Callable[[int, int, int], None]  # stream, address, value


class StreamHold:
    """Stops the current stream of a device until it is released. Used by one thread.

    The stream waits for a word of pinned memory, which takes none of the GPU's processors. In the meantime the thread
    must call nothing that waits for the stream. Should it do so all the same, because the driver waits for the whole
    device where nobody expects it, a guard in a thread of its own lets the stream go on.

    Source: CUDA Driver API, "Stream Memory Operations".

    Attributes
    ----------
    word
        The awaited word, int32 [1], pinned if the device is a GPU.
    """

    def __init__(self, device: torch.device, wait_for_value: WaitForValue | None = None) -> None:
        """`wait_for_value` stands for the driver's function, for tests.

        Raises
        ------
        SegmentError
            When the driver has none.
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
        """Whatever is launched next on the current stream waits for `release`."""
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
        """Lets the stream go on once `fill` has written what it waits for; False when the guard has done so before, and
        what was computed is of no use."""
        with self._lock:
            if self._since is None:
                return False
            fill()
            self._go_on()
            return True

    def _go_on(self) -> None:
        self._view[0] = self._value
        self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._lock:
                if self._since is not None and time.monotonic() - self._since > MOST_HELD_S:
                    self._go_on()
