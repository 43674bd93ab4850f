"""The path of all client services into the engine: check, tokenise, submit, deliver, end, log.

Each service translates its requests into draftwire.v1's GenerateRequest, and GenerateResponse into its responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from draftwire.contract.errors import (
    DraftwireError,
    InvalidArgumentError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from draftwire.contract.fields import check_limits, with_defaults
from draftwire.server.logs import fields
from draftwire.v1 import config_pb2
from draftwire.v1.generate_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GetVerifierInfoResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from verifier_service.api.preparation import DEFAULT_RULES, RequestPreparer, RequestRules
from verifier_service.api.request_log import Metadata, RequestWatch
from verifier_service.api.response_stream import ResponseStream, Write
from verifier_service.api.response_text import ResponseText
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.core.retry_hint import RetryAfterEstimator
from verifier_service.core.token_rate import TokenRate
from verifier_service.core.tokenizer import TextCodec
from verifier_service.engine.scheduler import queue_full
from verifier_service.host.access import EngineAccess, EngineFacts, Output, is_end

logger = logging.getLogger(__name__)

M = TypeVar("M", TokenizeRequest, DetokenizeRequest)
T = TypeVar("T")


class AbortedError(DraftwireError):
    """A request that was ended by the function that `RequestHandler.serve` gives."""


@dataclass
class _OpenOutput:
    """An output that is being computed or has unread messages."""

    stream: ResponseStream  # of all outputs of the request
    text: ResponseText
    index: int
    has_ended: bool = False  # whether the engine has delivered the last message or an error


class RequestHandler:
    """Passes requests of all services to the engine and writes the engine's responses. Used on one event loop.

    Attributes:
        codec: The target's tokenizer, or None.
    """

    def __init__(
        self,
        engine: EngineAccess,
        codec: TextCodec | None,
        config: config_pb2.SpeculativeConfig,
        on_failure: Callable[[], None],
        rules: RequestRules = DEFAULT_RULES,
    ) -> None:
        """`on_failure` is called after a fatal failure of the engine, in any thread."""
        self.codec = codec
        self._engine = engine
        self._preparer = RequestPreparer(engine.facts, codec, config, rules)
        self._rules = rules
        self._on_failure = on_failure
        self._outputs: dict[int, _OpenOutput] = {}  # by number
        self._num_preparing = 0  # outputs of requests that are being checked
        self._retry_after = RetryAfterEstimator(engine.facts.max_open)
        self._rate = TokenRate()
        self._is_draining = False
        self._all_ended = asyncio.Event()

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's facts, which requests are checked against."""
        return self._engine.facts

    @property
    def open_outputs(self) -> list[ResponseStream]:
        """Return the streams of requests that are being computed or have unread messages."""
        return list({id(output.stream): output.stream for output in self._outputs.values()}.values())

    @property
    def is_draining(self) -> bool:
        """Return whether new requests are refused, because the server is stopping."""
        return self._is_draining

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens per second of all requests over the last seconds."""
        return self._rate.tokens_per_s

    async def start(self) -> None:
        """Start the engine and the connections to the drafters."""
        await self._engine.start(self._deliver, self._on_failure)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and end those that are left after `timeout_s` seconds with an error."""
        self._is_draining = True
        if not self._outputs:
            return
        logger.info("%d outputs have %g s to end", len(self._outputs), timeout_s)
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except TimeoutError:
            logger.warning("ending %d outputs that are left after %g s", len(self._outputs), timeout_s)
            reason = f"the server is draining and gave this request {timeout_s:g} s to end (--drain-timeout)"
            await self._engine.end_requests(reason)

    async def stop(self) -> None:
        """Stop the engine and the connections to the drafters; requests that are left get an error."""
        await self._engine.stop()

    async def info(self) -> GetVerifierInfoResponse:
        """Return the description of the server; raise UnavailableError if the engine has ended."""
        info = await self._engine.info()
        info.has_tokenizer = self.codec is not None
        if self._rules.default_sampling_params is not None:
            info.default_sampling_params.CopyFrom(self._rules.default_sampling_params)
        return info

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Return the token ids of a prompt.

        Raises:
            InvalidArgumentError: As for the prompt of a request, except for its length in tokens.
            QueueFullError: If too many requests are being checked.
        """
        token_ids = await self._check(request, self._preparer.prompts.tokenise)
        return TokenizeResponse(token_ids=token_ids, max_model_len=self.facts.max_model_len)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of tokens; errors as of `tokenize`."""
        return DetokenizeResponse(text=await self._check(request, self._preparer.prompts.text_of))

    async def _check(self, request: M, read: Callable[[M], T]) -> T:
        """Check the limits of a request, and return the result of `read`, which runs in a thread."""
        if not self._has_room(1):
            raise self._refusal()
        self._preparer.prompts.check_message_size(request)
        check_limits(request)
        return await self._in_thread(1, partial(read, with_defaults(request)))

    async def _in_thread(self, num_outputs: int, prepare: Callable[[], T]) -> T:
        """Return the result of `prepare`, which runs in a thread and counts as `num_outputs` until the thread is done.

        A cancelled call counts as long: its prompt takes memory until then.
        """
        is_needed = True

        def run() -> T:
            if not is_needed:
                raise UnavailableError("the call was cancelled")
            return prepare()

        self._num_preparing += num_outputs
        work = asyncio.ensure_future(asyncio.to_thread(run))
        work.add_done_callback(partial(self._end_preparing, num_outputs))
        try:
            return await asyncio.shield(work)
        finally:
            is_needed = False

    def _end_preparing(self, num_outputs: int, work: asyncio.Future[Any]) -> None:
        self._num_preparing -= num_outputs
        if not work.cancelled():
            work.exception()  # a cancelled call does not read the exception, and asyncio would log it

    def _has_room(self, num_outputs: int) -> bool:
        return len(self._outputs) + self._num_preparing + num_outputs <= self.facts.max_open

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request uses, and return how many blocks can still be found.

        Raise UnavailableError if the engine has ended.
        """
        return await self._engine.flush_cache()

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        """Call `deliver` with the blocks of the prefix cache, and with every change. Call this method once."""
        self._engine.watch_cache(deliver)

    async def serve(
        self,
        request: GenerateRequest,
        name: str,
        metadata: Metadata,
        write: Write,
        on_submitted: Callable[[Callable[[], None]], object] = lambda _: None,
    ) -> DraftwireError | None:
        """Compute a request and write its output; return the error that ended the request, or None.

        Cancelling this call ends the request within a step. Errors are returned, not raised: gRPC would keep a raised
        error, and all objects in its frames, until the client reads.

        Args:
            request: The client's request; `request_id` is not read.
            name: Id of the request in logs and in the first response.
            metadata: Metadata of the call, with the client's traceparent if there is a trace.
            write: Called with each response, in order; awaited before the next one.
            on_submitted: Called with a function that ends the request at once; `serve` then writes the output so far
                and returns AbortedError. gRPC cannot take another message after an interrupted write.
        """
        watch = RequestWatch(name, metadata)
        try:
            numbers, stream = await self._submit(request, name, watch.traceparent)
        except QueueFullError as error:
            watch.failed(error)
            return error.with_traceback(None)
        except (InvalidArgumentError, UnavailableError) as error:
            watch.refused(error)
            return error.with_traceback(None)
        except asyncio.CancelledError:
            watch.cancelled(0)
            raise
        on_submitted(partial(self._abort, numbers, stream))
        return await self._write(numbers, stream, name, watch, write)

    def _abort(self, numbers: Sequence[int], stream: ResponseStream) -> None:
        for number in numbers:
            output = self._outputs.get(number)
            if output is not None and not output.has_ended:
                output.has_ended = True
                self._engine.cancel(number)
        if not stream.has_ended:
            stream.put(AbortedError("aborted"))

    async def _submit(
        self, request: GenerateRequest, name: str, traceparent: str
    ) -> tuple[Sequence[int], ResponseStream]:
        """Check, tokenise and submit a request; return the numbers of its outputs, and their stream.

        The prompt's tokens are not kept here: those of a long prompt take megabytes.

        Raises:
            InvalidArgumentError: If a field is invalid.
            QueueFullError: If there is no room.
            UnavailableError: If the server is draining.
        """
        num_outputs = self._preparer.num_outputs(request)
        if not self._has_room(num_outputs):
            self._engine.count_refused()
            raise self._refusal()
        self._preparer.prompts.check_message_size(request)
        work = await self._in_thread(num_outputs, partial(self._preparer.prepare, request, name, traceparent))
        if self._is_draining:
            raise UnavailableError("the server is draining and takes no further requests; ask another server")
        stream = ResponseStream(num_outputs)
        for index, number in enumerate(work.numbers):
            self._outputs[number] = _OpenOutput(stream, ResponseText(name, work.params, self.codec, work.prompt), index)
        self._engine.submit(work)
        return work.numbers, stream

    async def _write(
        self, numbers: Sequence[int], stream: ResponseStream, name: str, watch: RequestWatch, write: Write
    ) -> DraftwireError | None:
        """Write the outputs of a submitted request; return the error that ended the request, or None."""
        last: list[GenerateResponse] | None = None
        failure: DraftwireError | None = None
        try:
            last = await stream.write_to(write, name)
        except DraftwireError as error:
            failure = error.with_traceback(None)
        finally:
            for number in numbers:
                output = self._outputs.pop(number)
                if last is None and not output.has_ended:
                    self._engine.cancel(number)
                if not isinstance(failure, QueueFullError):
                    self._retry_after.count_end()
            if not self._outputs and self._is_draining:
                self._all_ended.set()
            if last is None and (failure is None or isinstance(failure, AbortedError)):
                watch.cancelled(stream.num_tokens)
        if last is not None:
            watch.finished(last)
        elif failure is not None and not isinstance(failure, AbortedError):
            watch.failed(failure)
        return failure

    def _deliver(self, outputs: Sequence[tuple[int, Output]]) -> None:
        num_tokens = 0
        for number, message in outputs:
            output = self._outputs.get(number)
            if output is None or output.has_ended or output.stream.has_ended:
                continue  # tokens that the engine computed after a stop text
            item = message if isinstance(message, DraftwireError) else self._with_text(number, output, message)
            output.has_ended = is_end(item)
            output.stream.put(item)
            num_tokens += 0 if isinstance(item, DraftwireError) else len(item.token_ids)
        self._rate.count(num_tokens)

    def _with_text(self, number: int, output: _OpenOutput, message: GenerateResponse) -> Output:
        """Return the message with its text, or the error that ends a request whose text cannot be decoded."""
        message.index = output.index
        try:
            if output.text.add_to(message):
                self._engine.cancel(number, "stop", output.text.num_tokens)
        except Exception as error:  # tokenizers raise bare Exception
            logger.exception("the output cannot be decoded", extra=fields(request_id=output.text.request_id))
            self._engine.cancel(number, "error")
            return ServerError(f"the output cannot be decoded: {error}")
        return message

    def _refusal(self) -> QueueFullError:
        """Return the error of a request for which there is no room."""
        retry_after_s = self._retry_after.retry_after_s()
        num_finished = sum(output.stream.is_finished for output in self._outputs.values())
        if num_finished <= self.facts.max_num_seqs:  # unfinished outputs fill the queue
            return queue_full(self.facts.max_queue, retry_after_s)
        text = f"{num_finished} outputs wait for clients that read slowly; try again later"
        return QueueFullError(text, retry_after_s)
