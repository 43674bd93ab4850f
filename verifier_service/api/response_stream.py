"""Bounded response queue of one client stream."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from draftwire.contract.errors import DraftwireError, StalledClientError
from draftwire.v1 import generate_pb2 as pb

# Writes one message to a client; its result is not used.
Write = Callable[[pb.GenerateResponse], Awaitable[object]]

# Maximum number of waiting messages. Further messages are merged, so that the queue is no larger than the output.
MAX_MESSAGES = 256
# Seconds after which the stream of a client that takes no message ends. Flow control passes about 100 KiB of output.
STALL_S = 60.0
# Seconds after the last token within which a client must have taken all output. At least STALL_S.
READ_S = 600.0


class ResponseStream:
    """Messages of one request until they are written, in order for each output. Used only on the event loop.

    Attributes:
        num_tokens: Output tokens of all messages.
    """

    def __init__(self, num_outputs: int = 1) -> None:
        self.num_tokens = 0
        self._num_open = num_outputs  # outputs without their last message
        self._num_unwritten = num_outputs  # outputs whose last message was not written
        self._messages: deque[pb.GenerateResponse] = deque()
        self._error: DraftwireError | None = None
        self._has_item = asyncio.Event()
        self._must_be_read_by = math.inf  # of time.monotonic()
        self._writes_since = math.inf  # of time.monotonic(); infinite while no message is being written
        self._writer: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall = ""  # why the writer was interrupted

    def put(self, item: pb.GenerateResponse | DraftwireError) -> None:
        """Add a message, or the error that ends all outputs."""
        if isinstance(item, DraftwireError):
            self._error = item
            self._set_deadline()
        else:
            if _is_last(item):
                self._num_open -= 1
                if self._num_open == 0:
                    self._set_deadline()
            self.num_tokens += len(item.token_ids)
            self._messages.append(item)
            if len(self._messages) > MAX_MESSAGES:
                self._merge_neighbours()
        self._has_item.set()

    @property
    def has_ended(self) -> bool:
        """Return whether the last message of each output, or the error that ends them, was put."""
        return self._must_be_read_by < math.inf

    @property
    def is_finished(self) -> bool:
        """Return whether the last message of each output was put."""
        return self._must_be_read_by < math.inf and self._error is None

    async def next_message(self) -> pb.GenerateResponse:
        """Wait for the next message and return it.

        Raises:
            DraftwireError: After the last message, the error that ended the output.
        """
        await self._has_item.wait()
        if not self._messages:
            assert self._error is not None
            raise self._error
        message = self._messages.popleft()
        if not self._messages and self._error is None:
            self._has_item.clear()
        return message

    async def write_to(self, write: Write, request_id: str) -> list[pb.GenerateResponse]:
        """Write all messages, the first with `request_id`; return the last message of each output.

        Raises:
            DraftwireError: The error that ended the output; StalledClientError if the client does not read, or reads
                for too long.
        """
        # One timer for all writes, because nearly all end long before it expires.
        self._writer = asyncio.current_task()
        self._watch()
        last: list[pb.GenerateResponse] = []
        try:
            while self._num_unwritten > 0:
                message = await self.next_message()
                message.request_id, request_id = request_id, ""
                self._writes_since = time.monotonic()
                await write(message)
                self._writes_since = math.inf
                if _is_last(message):
                    self._num_unwritten -= 1
                    last.append(message)
            return last
        except asyncio.CancelledError:
            if not self._stall:
                raise
            if self._writer is not None:
                self._writer.uncancel()
        finally:
            self._writer = None
            self._watch()
        raise StalledClientError(self._stall)  # here, because it must not refer to the interrupted frames

    def _watch(self) -> None:
        """Interrupt the writer if a message, or all of them, took too long; else check again later."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is None:
            return
        now = time.monotonic()
        if self._writes_since + STALL_S <= now:
            self._stall = f"the client has not read for {STALL_S:g} s"
        elif self._must_be_read_by <= now:
            self._stall = f"the client has not read all of the output {READ_S:g} s after its end"
        else:
            left_s = min(min(self._writes_since, now) + STALL_S, self._must_be_read_by) - now
            self._timer = asyncio.get_running_loop().call_later(left_s, self._watch)
            return
        self._writer.cancel()

    def _set_deadline(self) -> None:
        self._must_be_read_by = time.monotonic() + READ_S
        self._watch()

    def _merge_neighbours(self) -> None:
        merged: deque[pb.GenerateResponse] = deque()
        single: dict[int, pb.GenerateResponse] = {}  # by output
        for message in self._messages:
            first = single.pop(message.index, None)
            if first is None:
                single[message.index] = message
                merged.append(message)
            else:
                _append(first, message)
        self._messages = merged


def _is_last(message: pb.GenerateResponse) -> bool:
    return message.finish_reason != pb.FINISH_REASON_UNSPECIFIED


def _append(message: pb.GenerateResponse, following: pb.GenerateResponse) -> None:
    """Append a message to another."""
    length, text = len(message.text), message.text + following.text
    for index, end in enumerate(following.token_text_ends):
        following.token_text_ends[index] = length + end
    message.MergeFrom(following)
    message.text = text
