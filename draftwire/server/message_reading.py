"""Limits of the calls whose message a server has not read yet: their number, time and bytes.

By gRPC's flow control a call sends one window before the server reads its message, and the rest afterwards. So a server
that reads few messages at once holds few large messages, however many calls are open.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from draftwire.contract.addresses import receiving_at_most
from draftwire.contract.errors import QueueFullError

logger = logging.getLogger(__name__)

# Seconds from the start of a call within which its message must arrive.
MESSAGE_S = 10.0
# Seconds that the slowest read may last while another call waits and no reader is free.
CONTENDED_S = 1.0
# Seconds after which a refused client may try again; the slowest reads have ended by then.
RETRY_S = 1.0
# Refusals within this many seconds are one line in the log.
LOG_S = 1.0


@dataclass(frozen=True)
class ReadingLimits:
    """Limits of the unread messages that a server holds.

    Attributes:
        max_message_bytes: Size of the longest message; longer messages are refused unread with RESOURCE_EXHAUSTED.
        max_readers: Maximum number of messages that are read at once; each takes up to `max_message_bytes`.
        max_readers_of_peer: The same for one peer.
        max_unread: Maximum number of calls whose message has not arrived; each takes up to `window_bytes`.
        max_unread_of_peer: The same for one peer.
        window_bytes: Bytes that a call may send before its message is read.
    """

    max_message_bytes: int
    max_readers: int
    max_readers_of_peer: int
    max_unread: int
    max_unread_of_peer: int
    window_bytes: int = 64 * 1024

    def options(self) -> list[tuple[str, int]]:
        """Return the options of a gRPC server with these limits."""
        # A connection may have more calls than unread messages, because answers may take long.
        max_streams = 2 * self.max_unread + 64
        # By default gRPC cancels random calls without a reason when 1000 calls wait to be accepted.
        max_pending = 4 * max_streams
        return [
            *receiving_at_most(self.max_message_bytes),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.server.max_pending_requests", max_pending),
            ("grpc.server.max_pending_requests_hard_limit", max_pending),
            # Otherwise gRPC enlarges the window of every call of a fast connection.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", self.window_bytes),
        ]


class Readable(Protocol):
    """The part of a call's context that a reader needs."""

    def peer(self) -> str:
        """Return the address of the connection's other end."""

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF."""


@dataclass(eq=False)
class _Read:
    """A message that is being read."""

    peer: str
    since: float
    limit: asyncio.Timeout
    limit_s: float


class MessageReader:
    """Reads the messages of calls within `limits`. Used on one event loop.

    Peers are connections, or hosts with `by_host`. `on_refused` is called for each refused call.
    """

    def __init__(
        self, limits: ReadingLimits, on_refused: Callable[[], None] = lambda: None, *, by_host: bool = False
    ) -> None:
        self.limits = limits
        self._on_refused = on_refused
        self._by_host = by_host
        self._unread: Counter[str] = Counter()  # calls, by peer
        self._reads: dict[_Read, None] = {}  # the longest first
        self._reads_of_peer: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}  # peers; first come, first served
        self._unlogged: Counter[str] = Counter()  # refusals by reason

    async def read(self, context: Readable) -> Any:
        """Return the next message of a call, or grpc.aio.EOF.

        Raises:
            QueueFullError: If too many calls wait for their message, or no reader was free in time.
            TimeoutError: If the message did not arrive in time.
            InvalidArgumentError: If the context's decoder cannot decode the message.
        """
        peer = context.peer()
        if self._by_host:
            peer = peer.rpartition(":")[0]
        self._admit(peer)
        read: _Read | None = None
        try:
            async with asyncio.timeout(MESSAGE_S) as limit:
                await self._wait_for_turn(peer)
                read = _Read(peer, time.monotonic(), limit, MESSAGE_S)
                self._reads[read] = None
                return await context.read()
        except TimeoutError:
            pass  # errors below must not refer to this exception
        finally:
            _subtract(self._unread, peer)
            if read is not None:
                del self._reads[read]
                self._end_turn(peer)
        if read is None:
            raise self._refusal("too many messages are being read; try again later")
        self._log_soon("a message did not arrive in time")
        raise TimeoutError(f"the message did not arrive within {read.limit_s:g} s")

    def _admit(self, peer: str) -> None:
        if self._unread.total() >= self.limits.max_unread:
            raise self._refusal(f"{self.limits.max_unread} calls have not sent their message; try again later")
        if self._unread[peer] >= self.limits.max_unread_of_peer:
            whose = "host" if self._by_host else "connection"
            text = f"{self.limits.max_unread_of_peer} calls of this {whose} have not sent their message"
            raise self._refusal(f"{text}; try again later")
        self._unread[peer] += 1

    def _refusal(self, text: str) -> QueueFullError:
        self._on_refused()
        self._log_soon("calls refused: " + text)
        return QueueFullError(text, RETRY_S * random.uniform(0.75, 1.25))

    def _log_soon(self, text: str) -> None:
        """Log a refusal together with all equal refusals of the next second."""
        if not self._unlogged:
            asyncio.get_running_loop().call_later(LOG_S, self._log)
        self._unlogged[text] += 1

    def _log(self) -> None:
        for text, count in self._unlogged.items():
            logger.warning("%d times within %g s: %s", count, LOG_S, text)
        self._unlogged.clear()

    def _has_turn(self, peer: str) -> bool:
        limits = self.limits
        has_reader = self._reads_of_peer.total() < limits.max_readers
        return has_reader and self._reads_of_peer[peer] < limits.max_readers_of_peer

    async def _wait_for_turn(self, peer: str) -> None:
        """Wait until the peer's message may be read, and count it as being read."""
        if self._has_turn(peer):
            self._reads_of_peer[peer] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = peer
        try:
            while not turn.done():
                await asyncio.wait((turn,), timeout=CONTENDED_S)
                if not turn.done():
                    self._end_slowest()
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # the turn was given meanwhile
                self._end_turn(peer)
            raise

    def _end_turn(self, peer: str) -> None:
        _subtract(self._reads_of_peer, peer)
        following = next((turn for turn, other in self._waiting.items() if self._has_turn(other)), None)
        if following is not None:
            self._reads_of_peer[self._waiting.pop(following)] += 1
            following.set_result(None)

    def _end_slowest(self) -> None:
        """End the longest read if another call waits for its place and the read had its time."""
        if self._reads_of_peer.total() < self.limits.max_readers:
            return  # the waiting peer has the most reads itself
        now = time.monotonic()
        for read in self._reads:
            when = read.limit.when()
            is_ending = when is not None and when <= asyncio.get_running_loop().time()
            if not is_ending:
                if read.since + CONTENDED_S <= now:
                    read.limit_s = CONTENDED_S
                    read.limit.reschedule(asyncio.get_running_loop().time())
                return


def _subtract(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
