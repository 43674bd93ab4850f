"""Output on its way to one client: how much waits for one that reads slowly is bounded, and for how long."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc

from draftwire.errors import DraftwireError, StalledClientError
from draftwire.v1 import generate_pb2 as pb

# Messages that may wait; past them neighbours are made one, so that what waits is no larger than the output itself.
MAX_MESSAGES = 256
# A client that takes no message for so long is given up. Flow control lets some hundred KiB pass that nobody has read.
STALL_S = 60.0


class Unread:
    """Messages of one request, in order, until they are written. Used on the event loop alone."""

    def __init__(self) -> None:
        self._messages: deque[pb.GenerateResponse] = deque()
        self._error: DraftwireError | None = None
        self._is_there = asyncio.Event()

    def put(self, item: pb.GenerateResponse | DraftwireError) -> None:
        """Adds a message, or the error that ends the output."""
        if isinstance(item, DraftwireError):
            self._error = item
        else:
            self._messages.append(item)
            if len(self._messages) > MAX_MESSAGES:
                self._merge_neighbours()
        self._is_there.set()

    async def take(self) -> pb.GenerateResponse:
        """The next message, once there is one.

        Raises
        ------
        DraftwireError
            The one that has ended the output, after its last message.
        """
        await self._is_there.wait()
        if not self._messages:
            assert self._error is not None
            raise self._error
        message = self._messages.popleft()
        if not self._messages and self._error is None:
            self._is_there.clear()
        return message

    async def write_to(self, context: grpc.aio.ServicerContext, request_id: str) -> pb.GenerateResponse:
        """Writes everything, `request_id` with the first message; the last message.

        Raises
        ------
        DraftwireError
            The one that has ended the output; StalledClientError when the client has stopped to read.
        """
        while True:
            message = await self.take()
            message.request_id, request_id = request_id, ""
            try:
                async with asyncio.timeout(STALL_S):
                    await context.write(message)
            except TimeoutError:
                raise StalledClientError(f"the client has read nothing for {STALL_S:g} s") from None
            if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                return message

    def _merge_neighbours(self) -> None:
        messages = list(self._messages)
        for first, second in zip(messages[::2], messages[1::2], strict=False):
            _append(first, second)
        self._messages = deque(messages[::2])


def _append(message: pb.GenerateResponse, following: pb.GenerateResponse) -> None:
    """Makes one message of two."""
    length, text = len(message.text), message.text + following.text
    for index, end in enumerate(following.token_text_ends):
        following.token_text_ends[index] = length + end
    message.MergeFrom(following)
    message.text = text
