"""The link to a drafter: which messages are on it, when they are through, and what their answers tell of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from verifier_service.pacing.costs import DrafterCost

# A drafter that answers so soon after the answer before, by its computing time or beyond it, was busy in between.
BUSY_FOR = 1.5
LEAST_PAUSE_S = 0.5e-3
# So many in a row that never had a pause are believed nevertheless.
MOST_BEHIND = 8
# Fewer rows than this do not keep each other on a link.
LEAST_BULK_ROWS = 16


@dataclass(frozen=True)
class Message:
    """A message to a drafter that is not answered yet."""

    number: int  # counts the messages to this drafter
    sent: float  # monotonic time
    num_bytes: int
    rows: int
    drafts: int  # wanted of each sequence that wants any
    sequences: int  # that want drafts
    compute_s: float  # expected of the drafter
    expected: float  # monotonic time of the answer, as it was when the message was sent; 0 when nothing is known
    wait_until: float  # monotonic time until which its drafts are waited for
    has_histories: bool = False  # whether it has more rows of a sequence than a verify step brings
    is_behind: bool = False  # whether it may wait for drafts that were begun for another one, in vain


class Link:
    """Takes one message after another.

    With a way of t seconds, there and back, and b seconds for each byte, the bytes of message i are through, as seen
    from here, at max(sent[i] + t, through[i - 1]) + b * bytes[i]. A drafter that has a pause then takes the message at
    once and tells, with its answer, how long it computed. So an answer shows either t and b, or b alone.

    Attributes
    ----------
    last_answer
        Monotonic time of the last one of which something was learnt; 0 before.
    """

    def __init__(self, cost: DrafterCost) -> None:
        """`cost` is what is learnt of it."""
        self._cost = cost
        self._under_way: deque[Message] = deque()
        # When the bytes of the message that was answered last were through, as seen from here.
        self._answered = -math.inf
        self.last_answer = 0.0
        # When the bytes of its message were through, as seen from here, at the latest; and whether just then.
        self._through = -math.inf
        self._is_through_known = False
        self._num_behind = 0  # answers, the last ones, that told nothing

    def send(self, message: Message) -> None:
        """Notes that it is sent."""
        self._under_way.append(message)

    def free(self, message: Message | None = None) -> float:
        """Expected monotonic time at which the bytes up to those of a message that is under way are through, or those
        of all; in the past where there are none."""
        trip_s, per_byte = self._cost.link
        free = self._answered - trip_s
        for one in self._under_way:
            free = max(free, one.sent) + per_byte * one.num_bytes
            if message is not None and one.number >= message.number:
                break
        return free

    def note_answer(self, message: Message, received: float) -> bool:
        """Notes that one has come, of which something is learnt later; whether none is due."""
        while self._under_way and self._under_way[0].number <= message.number:
            self._under_way.popleft()
        self._answered = received - message.compute_s
        return not self._under_way

    def learn(self, message: Message, received: float, compute_s: float) -> None:
        """Learns from an answer, for which the drafter computed so long."""
        last, self.last_answer = self.last_answer, received
        through = received - compute_s  # if the drafter had a pause before; else sooner
        is_alone, is_known, trip_s = message.sent >= last, self._cost.is_link_known, self._cost.link[0]
        has_pause = received - last >= max(BUSY_FOR * compute_s, compute_s + LEAST_PAUSE_S)
        is_told = (is_alone or has_pause) and not message.is_behind
        if is_told and (is_alone or (is_known and message.sent + trip_s >= self._through)):
            self._cost.observe_link(through - message.sent, message.num_bytes, received)
        elif is_told and is_known and self._is_through_known:
            behind_s = through - self._through
            if message.has_histories:
                self._cost.observe_link(behind_s, message.num_bytes, received, is_queued=True)
            elif message.rows < LEAST_BULK_ROWS:  # which do not keep each other: the way is longer than it was thought
                self._cost.observe_link(trip_s + behind_s, message.num_bytes, received)
            # Else both may have been held up by what has nothing to do with bytes.
        if is_known or is_alone or message.is_behind:
            self._num_behind = 0
        elif self._num_behind < MOST_BEHIND:
            self._num_behind += 1
        else:  # one that never has a pause must become known too
            begun = max(message.sent, last - self._cost.transfer_s(message.num_bytes))
            self._cost.observe_link(max(0.0, through - begun), message.num_bytes, received)
        if through >= self._through:
            self._through, self._is_through_known = through, is_told
