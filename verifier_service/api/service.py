"""The Generation service: requests in, streams of output out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence

import grpc

from draftwire.contract.errors import (
    Described,
    DraftwireError,
    InvalidArgumentError,
    QueueFullError,
    ServerError,
    StalledClientError,
    UnavailableError,
)
from draftwire.contract.request_id import REQUEST_ID_KEY, choose_request_id
from draftwire.contract.retry import retry_metadata
from draftwire.contract.validation import check_limits, check_token_ids, resolve_sampling_params
from draftwire.server.logs import fields
from draftwire.v1 import config_pb2, generate_pb2, generate_pb2_grpc
from draftwire_kernels import derive_stream_keys
from verifier_service.api.request_log import RequestWatch
from verifier_service.api.response_stream import Unread
from verifier_service.api.response_text import ResponseText
from verifier_service.core.request import NoiseKeys
from verifier_service.core.retry_hint import QueuePace
from verifier_service.core.tokenizer import TextCodec
from verifier_service.engine.scheduler import queue_full
from verifier_service.host.access import EngineAccess, Output, Submission

logger = logging.getLogger(__name__)

SERVICE_NAME = generate_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
# Of a token id in a message, and of all that is not the prompt.
MAX_ID_BYTES = 5
OTHER_FIELDS_BYTES = 1024 * 1024

_STATUS_CODES: dict[type[DraftwireError], grpc.StatusCode] = {
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    StalledClientError: grpc.StatusCode.ABORTED,
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
}


def _trailing_metadata(error: DraftwireError) -> tuple[tuple[str, str | bytes], ...]:
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        return retry_metadata(str(error), error.retry_after_s)
    return ()


class GenerationServicer(generate_pb2_grpc.GenerationServicer):
    """Validates requests, hands them to the engine and streams what it gives back."""

    def __init__(
        self,
        engine: EngineAccess,
        codec: TextCodec | None,
        config: config_pb2.SpeculativeConfig,
        on_failure: Callable[[], None],
    ) -> None:
        """`on_failure` is called, in any thread, when the engine has failed for good."""
        self._engine = engine
        self._facts = engine.facts
        self._codec = codec
        self._config = config
        self._on_failure = on_failure
        self._numbers = itertools.count()
        self._unread: dict[int, Unread] = {}  # by the requests' numbers
        self._texts: dict[int, ResponseText] = {}  # likewise
        self._num_preparing = 0  # requests that are being checked
        self._pace = QueuePace(engine.facts.max_open)
        self._is_draining = False
        self._all_ended = asyncio.Event()

    async def start(self) -> None:
        """Starts the engine and the connections to the drafters."""
        await self._engine.start(self._deliver, self._on_failure)

    async def drain(self, timeout_s: float) -> None:
        """Takes no request any more, and gives those that it has so many seconds; what is left then gets an error."""
        self._is_draining = True
        if not self._unread:
            return
        logger.info("%d requests have %g s to end", len(self._unread), timeout_s)
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests are left after %g s and end now", len(self._unread), timeout_s)
            reason = f"the server is draining and gave this request {timeout_s:g} s to end (--drain-timeout)"
            await self._engine.end_requests(reason)

    async def stop(self) -> None:
        """Ends both; requests that are left get an error."""
        await self._engine.stop()

    def _deliver(self, outputs: Sequence[tuple[int, Output]]) -> None:
        for number, output in outputs:
            unread = self._unread.get(number)
            if unread is not None and not unread.has_ended:  # after a stop text the engine computes a few tokens more
                unread.put(output if isinstance(output, DraftwireError) else self._with_text(number, output))

    def _with_text(self, number: int, message: generate_pb2.GenerateResponse) -> Output:
        """Return the message with its text, or the error that ends the request because it cannot be made."""
        text = self._texts[number]
        try:
            if text.add_to(message):
                self._engine.cancel(number, "stop", text.num_tokens)
        except Exception as error:  # tokenizers raise bare Exception
            logger.exception("the output cannot be decoded", extra=fields(request_id=text.request_id))
            self._engine.cancel(number, "error")
            return ServerError(f"the output cannot be decoded: {error}")
        return message

    # It writes through the context, where a client that does not read shows, and so is no iterator.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """See proto/draftwire/v1/generate.proto."""
        try:
            name = choose_request_id(request.request_id, context.invocation_metadata() or ())
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await context.send_initial_metadata(((REQUEST_ID_KEY, name),))
        watch = RequestWatch(name, context.invocation_metadata() or ())
        failure = await self._serve(request, context, name, watch)
        if failure is not None:
            code = _STATUS_CODES.get(type(failure), grpc.StatusCode.INTERNAL)
            # It ends once the client has read what is on its way, if ever: nothing of the request may be held here.
            await context.abort(code, str(failure), _trailing_metadata(failure))

    async def _serve(
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext, name: str, watch: RequestWatch
    ) -> DraftwireError | None:
        """Has the request computed and writes its output; the error that it has ended with."""
        if len(self._unread) + self._num_preparing >= self._facts.max_open:
            self._engine.count_refused()
            refusal = self._refusal()
            watch.failed(refusal)
            return refusal
        self._num_preparing += 1
        try:
            self._check_message_size(request)
            work = await asyncio.to_thread(self._prepare, request, name, watch.traceparent)
            if self._is_draining:
                text = "the server is draining: it is about to end and takes no further request; ask another one"
                raise UnavailableError(text)
        except (InvalidArgumentError, UnavailableError) as error:
            watch.refused(error)
            return error.with_traceback(None)
        finally:
            self._num_preparing -= 1
        unread = self._unread[work.number] = Unread()
        self._texts[work.number] = ResponseText(name, work.params, self._codec, work.prompt)
        self._engine.submit(work)
        last: generate_pb2.GenerateResponse | None = None
        failure: DraftwireError | None = None
        try:
            last = await unread.write_to(context, name)
        except DraftwireError as error:
            failure = error.with_traceback(None)
        finally:
            del self._unread[work.number], self._texts[work.number]
            if not isinstance(failure, QueueFullError):
                self._pace.count_end()
            if not self._unread and self._is_draining:
                self._all_ended.set()
            if last is None:
                self._engine.cancel(work.number)
                if failure is None:
                    watch.cancelled(unread.num_tokens)
        if last is not None:
            watch.finished(last)
        elif failure is not None:
            watch.failed(failure)
        return failure

    def _refusal(self) -> QueueFullError:
        """What a request is told when too many are open."""
        retry_after_s = self._pace.retry_after_s()
        num_finished = sum(unread.is_finished for unread in self._unread.values())
        if num_finished <= self._facts.max_num_seqs:  # then the others fill the batch and the queue
            return queue_full(self._facts.max_queue, retry_after_s)
        text = f"{num_finished} outputs wait for clients that read slowly; try again later"
        return QueueFullError(text, retry_after_s)

    def _prepare(self, request: generate_pb2.GenerateRequest, request_id: str, traceparent: str) -> Submission:
        """The validated request.

        Raises
        ------
        InvalidArgumentError
            Names the field, its value and what is allowed.
        """
        check_limits(request)
        params = resolve_sampling_params(request.sampling_params, self._facts.vocab_size)
        prompt = self._prompt(request)
        longest = self._facts.max_model_len
        if len(prompt) >= longest:
            self._refuse_length(f"{len(prompt)} tokens")
        if params.stop and self._codec is None:
            raise InvalidArgumentError("sampling_params.stop", list(params.stop), "this server has no tokenizer")
        seed = params.seed if params.HasField("seed") else secrets.randbits(63)
        return Submission(
            number=next(self._numbers),
            request_id=request_id,
            prompt=prompt,
            params=params,
            num_speculative_tokens=self._num_speculative_tokens(request),
            keys=NoiseKeys(*(int(key) for key in derive_stream_keys([seed]))),
            max_length=min(len(prompt) + params.max_tokens, longest),
            traceparent=traceparent,
        )

    def _num_speculative_tokens(self, request: generate_pb2.GenerateRequest) -> int:
        most = self._config.num_speculative_tokens
        if not request.HasField("num_speculative_tokens"):
            return most
        if request.num_speculative_tokens > most:
            raise InvalidArgumentError(
                "num_speculative_tokens", request.num_speculative_tokens, f"allowed range [0, {most}] on this server"
            )
        return request.num_speculative_tokens

    def _prompt(self, request: generate_pb2.GenerateRequest) -> list[int]:
        """Return the prompt's token ids, for each of which the target has a row."""
        token_ids = self._read_prompt(request)
        kind = request.WhichOneof("prompt")
        field = {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(str(kind), str(kind))
        if not token_ids:
            raise InvalidArgumentError(field, Described("no token"), "at least one token is required")
        describe = int if self._codec is None or kind == "token_ids" else self._codec.describe
        check_token_ids(field, token_ids, self._facts.vocab_size, describe)
        return token_ids

    def _read_prompt(self, request: generate_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        self._check_size(request)
        if kind is None:
            raise InvalidArgumentError("prompt", None, "exactly one of text, token_ids and chat is required")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if self._codec is None:
            raise InvalidArgumentError("prompt", kind, "this server has no tokenizer; send token_ids")
        if kind == "chat":
            if not request.chat.messages:
                raise InvalidArgumentError("chat.messages", [], "at least one message is required")
            if not all(message.role for message in request.chat.messages):
                raise InvalidArgumentError("chat.messages.role", "", "allowed length 1 to 64 bytes, got 0")
            return self._codec.encode_chat(request.chat.messages)
        if not request.text:
            raise InvalidArgumentError("text", request.text, "must not be empty")
        return self._codec.encode(request.text)

    def _check_message_size(self, request: generate_pb2.GenerateRequest) -> None:
        """Refuse at once what no prompt can need: such messages must not wait in memory until they are checked."""
        per_token = max(MAX_ID_BYTES, 0 if self._codec is None else self._codec.longest_token_bytes)
        if (num_bytes := request.ByteSize()) > self._facts.max_model_len * per_token + OTHER_FIELDS_BYTES:
            self._refuse_length(f"a message of {num_bytes} bytes")

    def _check_size(self, request: generate_pb2.GenerateRequest) -> None:
        """Refuses, before it is read and tokenised, what no context can hold."""
        longest = self._facts.max_model_len
        if len(request.token_ids.ids) >= longest:
            self._refuse_length(f"{len(request.token_ids.ids)} tokens")
        if self._codec is not None:
            texts = [request.text, *(message.content for message in request.chat.messages)]
            num_bytes = sum(len(text.encode()) for text in texts)
            if num_bytes > longest * self._codec.longest_token_bytes:
                self._refuse_length(f"{num_bytes} bytes")

    def _refuse_length(self, length: str) -> None:
        longest = self._facts.max_model_len
        allowed = f"allowed range [1, {longest - 1}] tokens: the context has {longest}"
        raise InvalidArgumentError("prompt", Described(length), allowed)

    async def GetVerifierInfo(  # noqa: N802
        self,
        request: generate_pb2.GetVerifierInfoRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,
    ) -> generate_pb2.GetVerifierInfoResponse:
        """See proto/draftwire/v1/generate.proto."""
        try:
            info = await self._engine.info()
            info.has_tokenizer = self._codec is not None
            return info
        except DraftwireError as error:
            await context.abort(_STATUS_CODES.get(type(error), grpc.StatusCode.INTERNAL), str(error))
