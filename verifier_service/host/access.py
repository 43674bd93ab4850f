"""What the Generation service needs of an engine, wherever that runs: in this process, or in one of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from draftwire.contract.errors import DraftwireError
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.core.cache_events import CacheEvent, DeliverCacheEvents
from verifier_service.core.request import NoiseKeys
from verifier_service.grammar.translation import GrammarSource

if TYPE_CHECKING:
    from verifier_service.host.host import EngineHost

# Output of a request in one step, without its text, or the error that ends it.
Output = generate_pb2.GenerateResponse | DraftwireError
# Takes what a step has made, each message with the number of its output.
Deliver = Callable[[Sequence[tuple[int, Output]]], None]


@dataclass(frozen=True)
class Submission:
    """A request that was found valid, as it is handed to an engine."""

    numbers: tuple[int, ...]  # of its outputs; no other output of the service has them
    request_id: str
    prompt: list[int]
    params: config_pb2.SamplingParams
    num_speculative_tokens: int
    keys: tuple[NoiseKeys, ...]  # of its outputs
    max_length: int  # most tokens of prompt and output
    traceparent: str = ""  # of its span; empty without a trace
    grammar: GrammarSource | None = None  # of its structured output
    priority: int = 0  # requests of a lower number go first
    cache_salt: str = ""  # only requests of the same salt share cache blocks
    arrived: float = field(default_factory=time.monotonic)  # a clock of the machine, so the same in all its processes


@dataclass(frozen=True)
class EngineFacts:
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    max_open: int  # requests that are computed, wait, or are not read to their end


def is_end(output: Output) -> bool:
    """Return whether a request has no more output after this."""
    return isinstance(output, DraftwireError) or output.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED


class EngineAccess(Protocol):
    """An engine as the event loop has it; nothing here blocks the loop."""

    facts: EngineFacts

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """Start the engine. `deliver` is called on the event loop; `on_failure`, in any thread, when the engine has
        failed for good and its requests have their error.
        """

    def submit(self, submission: Submission) -> None:
        """Hand a request over; each of its outputs, or an error, is delivered."""

    def cancel(self, number: int, reason: str = "abort", output_tokens: int = 0) -> None:
        """End an output without further messages, if it has not ended.

        `reason` is one of `FINISHED_REASONS`: "stop" where a stop text ends the output after `output_tokens` tokens.
        """

    def count_refused(self) -> None:
        """Count a request that was not submitted."""

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        """Return what `GetVerifierInfo` answers; raises UnavailableError when there is no engine any more."""

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request uses; return how many blocks can still be found.

        Raises UnavailableError when there is no engine any more.
        """

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """Have `deliver` called on the event loop with what the prefix cache has, and with every change."""

    async def end_requests(self, reason: str) -> None:
        """End all requests, and those that still come, with UnavailableError, which says the reason."""

    async def stop(self) -> None:
        """End the engine and the connections to the drafters; requests that are left get an error."""


class InProcessEngine:
    """The `EngineAccess` to an engine of this process."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.facts = host.facts
        self.submit = host.submit
        self.cancel = host.cancel
        self.count_refused = host.count_refused

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """See EngineAccess."""
        loop = asyncio.get_running_loop()

        def deliver_there(outputs: Sequence[tuple[int, Output]]) -> None:
            loop.call_soon_threadsafe(deliver, outputs)

        self._host.start(deliver_there, on_failure)

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        """See EngineAccess."""
        return self._host.info()

    async def flush_cache(self) -> int:
        """See EngineAccess."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()

        def answer_there(left: int) -> None:
            loop.call_soon_threadsafe(_answer, answer, left)

        self._host.flush_cache(answer_there)
        return await answer

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """See EngineAccess."""
        loop = asyncio.get_running_loop()

        def deliver_there(events: Sequence[CacheEvent]) -> None:
            loop.call_soon_threadsafe(deliver, events)

        self._host.watch_cache(deliver_there)

    async def end_requests(self, reason: str) -> None:
        """See EngineAccess."""
        await asyncio.to_thread(self._host.end_requests, reason)

    async def stop(self) -> None:
        """See EngineAccess."""
        await asyncio.to_thread(self._host.stop)


def _answer(answer: asyncio.Future[int], value: int) -> None:
    if not answer.done():  # as when its client has gone
        answer.set_result(value)
