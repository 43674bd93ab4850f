"""Access of the client services to an engine in this process or in a separate process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.contract.errors import DraftwireError
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.core.request import NoiseKeys
from verifier_service.grammar.translation import GrammarSource

# Output of a request in one step, without its text, or the error that ends it.
Output = generate_pb2.GenerateResponse | DraftwireError
# Takes the output of a step: (number of the output, message or error) each.
Deliver = Callable[[Sequence[tuple[int, Output]]], object]


@dataclass(frozen=True)
class Submission:
    """A validated request for an engine."""

    numbers: tuple[int, ...]  # of its outputs; unique in the service
    request_id: str
    prompt: list[int]
    params: config_pb2.SamplingParams
    num_speculative_tokens: int
    keys: tuple[NoiseKeys, ...]  # one per output
    max_length: int  # most tokens of prompt and output
    traceparent: str = ""  # of its span; empty without a trace
    grammar: GrammarSource | None = None  # for structured output
    priority: int = 0  # requests of a lower number go first
    cache_salt: str = ""  # only requests of the same salt share cache blocks
    arrived: float = field(default_factory=time.monotonic)  # all processes of a machine share this clock


@dataclass(frozen=True)
class EngineFacts:
    """The engine's facts, which requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    max_open: int  # most requests that run, wait, or have unread output


def is_end(output: Output) -> bool:
    """Return whether this is the last item of an output."""
    return isinstance(output, DraftwireError) or output.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED


class EngineAccess(Protocol):
    """An engine for the event loop; no method blocks the loop."""

    facts: EngineFacts

    async def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """Start the engine. `deliver` is called on the event loop; `on_failure` in any thread, after a fatal failure of
        the engine and the requests' errors.
        """

    def submit(self, submission: Submission) -> None:
        """Submit a request; its outputs, or an error for each, are delivered."""

    def cancel(self, number: int, reason: str = "abort", output_tokens: int = 0) -> None:
        """End an output without further messages, unless it has ended.

        `reason` is one of `FINISHED_REASONS`: "stop" if a stop text ends the output after `output_tokens` tokens.
        """

    def count_refused(self) -> None:
        """Count a request that was not submitted."""

    async def info(self) -> generate_pb2.GetVerifierInfoResponse:
        """Return the answer of `GetVerifierInfo`; raise UnavailableError if the engine has ended."""

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request uses, and return how many blocks can still be found.

        Raise UnavailableError if the engine has ended.
        """

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """Call `deliver`, on the event loop, with the blocks of the prefix cache, and with every change."""

    async def end_requests(self, reason: str) -> None:
        """End all present and future requests with UnavailableError and this reason."""

    async def stop(self) -> None:
        """Stop the engine and the connections to the drafters; requests that are left get an error."""
