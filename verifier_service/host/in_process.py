"""Access to an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from draftwire.v1 import generate_pb2
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.host.access import Deliver
from verifier_service.host.host import EngineHost


class InProcessEngine:
    """Access to an engine in this process."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.facts = host.facts
        self.submit = host.submit
        self.cancel = host.cancel
        self.count_refused = host.count_refused

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._host.start(lambda outputs: loop.call_soon_threadsafe(deliver, outputs), on_failure)

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        return self._host.info()

    async def flush_cache(self) -> int:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        self._host.flush_cache(lambda count: loop.call_soon_threadsafe(_answer, answer, count))
        return await answer

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        loop = asyncio.get_running_loop()
        self._host.watch_cache(lambda events: loop.call_soon_threadsafe(deliver, events))

    async def end_requests(self, reason: str) -> None:
        await asyncio.to_thread(self._host.end_requests, reason)

    async def stop(self) -> None:
        await asyncio.to_thread(self._host.stop)


def _answer(answer: asyncio.Future[int], value: int) -> None:
    if not answer.done():  # done if the call was cancelled
        answer.set_result(value)
