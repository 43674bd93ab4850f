"""Access to an engine in a separate process, for the client process's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from draftwire.contract.errors import DraftwireError, ServerError, UnavailableError
from draftwire.server.memory import peak_host_bytes
from draftwire.v1 import generate_pb2
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.host.access import Deliver, EngineFacts, Output, Submission, is_end
from verifier_service.host.channel import Message, pack, read
from verifier_service.host.process import STOP_LIMIT_S, EngineProcess

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineProxy:
    """Access to a ready engine process. If that process ends by itself, the engine has failed."""

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
        self._loss: DraftwireError | None = None  # why the engine has ended

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        self._deliver, self._on_failure = deliver, on_failure
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection)
        self._reading = asyncio.create_task(self._read(reader))

    def submit(self, submission: Submission) -> None:
        self._open.update(submission.numbers)
        self._send(("submit", submission))
        if self._loss is not None:
            asyncio.get_running_loop().call_soon(self._end_open)

    def cancel(self, number: int, reason: str = "abort", output_tokens: int = 0) -> None:
        self._open.discard(number)
        self._send(("cancel", number, reason, output_tokens))

    def count_refused(self) -> None:
        self._send(("count_refused",))

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        return await self._ask("info", self._infos)

    async def flush_cache(self) -> int:
        return await self._ask("flush_cache", self._flushes)

    async def _ask(self, name: str, answers: deque[asyncio.Future[T]]) -> T:
        """Send a message, and wait for its answer, which `_take` gives to the first of `answers`."""
        if self._loss is not None:
            raise UnavailableError(str(self._loss))
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answers.append(answer)
        self._send((name,))
        return await answer

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        self._deliver_cache_events = deliver
        self._send(("watch_cache",))

    async def end_requests(self, reason: str) -> None:
        self._send(("end_requests", reason))
        if self._loss is None:
            with suppress(TimeoutError):
                async with self._stop_limit():
                    await self._requests_ended.wait()

    async def stop(self) -> None:
        """Stop the engine's process: wait until it has closed its socket, and kill it if it hangs."""
        self._is_stopping = True
        self._send(("stop",))
        try:
            async with self._stop_limit():
                await asyncio.shield(self._reading)
        except TimeoutError:
            logger.critical("killing the engine's process: the engine has not ended within %g s", STOP_LIMIT_S)
            self._process.kill()
            self._on_failure()
            await self._reading
        self._writer.close()

    def _stop_limit(self) -> asyncio.Timeout:
        """Return a timeout at STOP_LIMIT_S after the first call."""
        if self._stop_by is None:
            self._stop_by = asyncio.get_running_loop().time() + STOP_LIMIT_S
        return asyncio.timeout_at(self._stop_by)

    def _send(self, message: Message) -> None:
        if self._loss is None:
            self._writer.write(pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take the engine's messages until its process has ended."""
        try:
            while True:
                self._take(await read(reader))
        except EOFError:
            pass
        except Exception:
            logger.exception("a message of the engine's process cannot be read")
            self._writer.close()  # ends the process
        if self._is_stopping:
            self._loss = UnavailableError("the server is shutting down")
        else:
            self._loss = ServerError("the engine's process has ended unexpectedly; the server's log has the cause")
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
                self._deliver_outputs([(number, _decode(output)) for number, output in encoded])
            case ("info", data):
                answer = self._infos.popleft()
                if answer.done():  # the call was cancelled
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

    def _deliver_outputs(self, outputs: Sequence[tuple[int, Output]]) -> None:
        self._open.difference_update(number for number, output in outputs if is_end(output))
        self._deliver(outputs)

    def _end_open(self) -> None:
        """Deliver an error to all open outputs."""
        assert self._loss is not None
        self._deliver_outputs([(number, self._loss) for number in self._open])


def _decode(output: bytes | DraftwireError) -> Output:
    return output if isinstance(output, DraftwireError) else generate_pb2.GenerateResponse.FromString(output)
