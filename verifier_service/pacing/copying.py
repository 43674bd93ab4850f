"""How much the host may copy for a drafter beside a step that runs, so that the step after it is launched in time."""

from __future__ import annotations

from collections import deque

# Bytes at least, at first and at most.
LEAST_BYTES, FIRST_BYTES, MOST_BYTES = 1024 * 1024, 3 * 512 * 1024, 16 * 1024 * 1024
# More of them are tried after each step that was in time, and fewer after one for which the device waited for such a
# share of what it took, behind a message of at least half as many.
MORE, FEWER = 1.05, 0.75
LATE_SHARE = 0.05
# A launch follows behind what was sent since so many steps.
STEPS_BEHIND = 3


class CopyLimit:
    """Of a message that has rows of prompts and histories, and its tensors inside.

    The thread that sends it and the one that launches steps wait for each other, so that a few milliseconds of copying
    are a pause of the device's. They are hidden where steps are launched while others run, as far as those take longer
    than a launch.

    Attributes
    ----------
    num_bytes
        The most of a message.
    """

    def __init__(self) -> None:
        self.num_bytes = float(FIRST_BYTES)
        self._sent: deque[int] = deque([0] * STEPS_BEHIND, maxlen=STEPS_BEHIND)  # since each of the last steps

    def count_sent(self, num_bytes: int) -> None:
        """Notes bytes that were sent."""
        self._sent[-1] += num_bytes

    def count_step(self, step_s: float, late_s: float) -> None:
        """Learns of a step that was launched while another one ran: what it took, and how much longer the device had
        waited for it than for others."""
        most = max(self._sent)
        self.skip_step()
        if late_s > LATE_SHARE * step_s:
            if most >= self.num_bytes / 2:
                self.num_bytes = max(FEWER * self.num_bytes, LEAST_BYTES)
        elif most >= self.num_bytes / MORE:  # fewer show nothing
            self.num_bytes = min(MORE * self.num_bytes, MOST_BYTES)

    def skip_step(self) -> None:
        """A step that tells nothing has passed."""
        self._sent.append(0)
