"""An engine in a process of its own, as the event loop of the process that talks to clients has it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from draftwire.contract.errors import DraftwireError, ServerError, UnavailableError
from draftwire.server.memory import peak_host_bytes
from draftwire.v1 import generate_pb2
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.host.access import Deliver, EngineFacts, Output, Submission, is_end
from verifier_service.host.channel import Message, pack, read
from verifier_service.host.process import STOP_LIMIT_S, EngineProcess

logger = logging.getLogger(__name__)


class EngineProxy:
    """The `EngineAccess` to an engine's process that is ready; when that ends by itself, the engine has failed."""

    def __init__(self, process: EngineProcess, facts: EngineFacts) -> None:
        self.facts = facts
        self._process = process
        self._open: set[int] = set()
        self._infos: deque[asyncio.Future[generate_pb2.GetVerifierInfoResponse]] = deque()
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._deliver_cache_events: DeliverCacheEvents | None = None
        self._requests_ended = asyncio.Event()
        self._is_stopping = False
        self._stop_by: float | None = None  # by the event loop's clock
        self._loss: DraftwireError | None = None  # why there is no engine any more

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """See EngineAccess."""
        self._deliver, self._on_failure = deliver, on_failure
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection)
        self._reading = asyncio.create_task(self._read(reader))

    def submit(self, submission: Submission) -> None:
        """See EngineAccess."""
        self._open.update(submission.numbers)
        self._send(("submit", submission))
        if self._loss is not None:
            asyncio.get_running_loop().call_soon(self._end_open)

    def cancel(self, number: int, reason: str = "abort", output_tokens: int = 0) -> None:
        """See EngineAccess."""
        self._open.discard(number)
        self._send(("cancel", number, reason, output_tokens))

    def count_refused(self) -> None:
        """See EngineAccess."""
        self._send(("count_refused",))

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        """See EngineAccess."""
        if self._loss is not None:
            raise UnavailableError(str(self._loss))
        answer: asyncio.Future[generate_pb2.GetVerifierInfoResponse] = asyncio.get_running_loop().create_future()
        self._infos.append(answer)
        self._send(("info",))
        return await answer

    async def flush_cache(self) -> int:
        """See EngineAccess."""
        if self._loss is not None:
            raise UnavailableError(str(self._loss))
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._send(("flush_cache",))
        return await answer

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """See EngineAccess."""
        self._deliver_cache_events = deliver
        self._send(("watch_cache",))

    async def end_requests(self, reason: str) -> None:
        """See EngineAccess."""
        self._send(("end_requests", reason))
        if self._loss is None:
            with suppress(TimeoutError):
                async with self._stop_limit():
                    await self._requests_ended.wait()

    async def stop(self) -> None:
        """See EngineAccess; returns when the process has closed its socket. One that hangs is killed."""
        self._is_stopping = True
        self._send(("stop",))
        try:
            async with self._stop_limit():
                await asyncio.shield(self._reading)
        except TimeoutError:
            logger.critical("the engine has not ended in %g s; its process is killed", STOP_LIMIT_S)
            self._process.kill()
            self._on_failure()
            await self._reading
        self._writer.close()

    def _stop_limit(self) -> asyncio.Timeout:
        """Until STOP_LIMIT_S after the first call."""
        if self._stop_by is None:
            self._stop_by = asyncio.get_running_loop().time() + STOP_LIMIT_S
        return asyncio.timeout_at(self._stop_by)

    def _send(self, message: Message) -> None:
        if self._loss is None:
            self._writer.write(pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the engine sends, until its process has ended."""
        try:
            while True:
                self._take(await read(reader))
        except EOFError:
            pass
        except Exception:
            logger.exception("what the engine's process has sent cannot be taken")
            self._writer.close()  # which ends it
        if self._is_stopping:
            self._loss = UnavailableError("the server is shutting down")
        else:
            self._loss = ServerError("the engine's process has ended by itself; the server's log says more")
        self._end_open()
        answers: list[asyncio.Future[Any]] = [*self._infos, *self._flushes]
        for answer in answers:
            if not answer.done():
                answer.set_exception(UnavailableError(str(self._loss)))
        self._requests_ended.set()
        if not self._is_stopping:
            status = await asyncio.to_thread(self._process.exit_status)
            logger.critical("the engine's process ended with status %s, and the verifier with it", status)
            self._on_failure()

    def _take(self, message: Message) -> None:
        match message:
            case ("deliver", encoded):
                self._give_out([(number, _decode(output)) for number, output in encoded])
            case ("info", data):
                answer = self._infos.popleft()
                if answer.done():  # as when its client has gone
                    return
                if isinstance(data, DraftwireError):
                    answer.set_exception(data)
                    return
                info = generate_pb2.GetVerifierInfoResponse.FromString(data)
                info.server_memory.peak_host_bytes = peak_host_bytes()
                answer.set_result(info)
            case ("cache_flushed", left):
                flushed = self._flushes.popleft()
                if not flushed.done():
                    flushed.set_result(left)
            case ("cache_events", events) if self._deliver_cache_events is not None:
                self._deliver_cache_events(events)
            case ("requests_ended",):
                self._requests_ended.set()
            case ("failed",):
                self._on_failure()

    def _give_out(self, outputs: Sequence[tuple[int, Output]]) -> None:
        self._open.difference_update(number for number, output in outputs if is_end(output))
        self._deliver(outputs)

    def _end_open(self) -> None:
        """Tell the requests that nobody computes any more."""
        assert self._loss is not None
        self._give_out([(number, self._loss) for number in self._open])


def _decode(output: bytes | DraftwireError) -> Output:
    return output if isinstance(output, DraftwireError) else generate_pb2.GenerateResponse.FromString(output)
