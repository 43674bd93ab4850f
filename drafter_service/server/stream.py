"""One stream of a verifier after its hello: steps in, drafts out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError

from drafter_service.engine.answer import Answer
from drafter_service.engine.session import Session
from drafter_service.server.engine_thread import EngineFailureError, EngineThread
from drafter_service.server.sequence_log import SequenceWatch
from drafter_service.server.step_decoder import StepDecoder
from draftwire.contract.addresses import KEEP_ALIVE_S, SILENCE_S
from draftwire.contract.errors import InvalidArgumentError, QueueFullError
from draftwire.transport import Body, Channel, Record, TensorReceiver, TensorSender
from draftwire.transport.encoding import Encoded
from draftwire.transport.traffic import Traffic
from draftwire.v1 import draft_pb2 as pb

logger = logging.getLogger(__name__)

MAX_UNANSWERED_STEPS = 64
MAX_UNANSWERED_BYTES = 512 * 1024 * 1024

Context = grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse | Encoded]
# Size of the message that the running task has read last. gRPC decodes a message in this task and drops its size.
last_read_bytes: ContextVar[int] = ContextVar("last_read_bytes")


class DraftStream:
    """Reads and checks steps, queues them in the engine and writes the answers; limits unanswered steps.

    Steps come over the stream or the channel, and are checked on the engine's thread. Answers go over the channel until
    an answer does not fit: from the engine's thread, or from the event loop if it must wait for logits.
    """

    def __init__(
        self,
        context: Context,
        decoder: StepDecoder,
        engine: EngineThread,
        receiver: TensorReceiver,
        sender: TensorSender,
        watch: SequenceWatch,
        traffic: Traffic,
        answer_row_bytes: int,
        channel: Channel | None = None,
    ) -> None:
        """`receiver` takes features, `sender` sends draft logits of `answer_row_bytes` a draft. `watch` logs the
        sequences. `traffic` counts the bytes of tensors and of the channel's messages."""
        self._context = context
        self._decoder = decoder
        self._engine = engine
        self._receiver = receiver
        self._sender = sender
        self._watch = watch
        self._traffic = traffic
        self._answer_row_bytes = answer_row_bytes
        self._channel = channel
        self._is_direct = channel is not None
        self._session: Session | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        # None after the last answer.
        self._answers: asyncio.Queue[Answer | pb.Draining | Exception | None] = asyncio.Queue()
        self._lock = threading.Lock()  # guards the fields below
        self._all_read = False
        self._has_failed = False
        self._unanswered: dict[int, int] = {}  # step id -> bytes of its message, features and answer
        self._unanswered_bytes = 0

    @property
    def num_unanswered(self) -> int:
        """Number of received steps without an answer; thread-safe."""
        return len(self._unanswered)

    def deliver(self, answer: Answer | Exception) -> None:
        """Take an answer, or the error that ended the session, on the engine's thread."""
        if isinstance(answer, Answer):
            self._engine.later(partial(self._watch.take_answer, answer))
            answer.begin_sending(self._sender, self._traffic)
            if self._is_direct and not self._answer_row_bytes and self._send_directly(self._encode(answer)):
                self._settle(answer.step_id)
                return
        self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def drain(self, timeout_s: float) -> None:
        """Tell the verifier that the drafter ends this stream after `timeout_s` seconds."""
        self._answers.put_nowait(pb.Draining(timeout_s=timeout_s))

    async def run(self, session: Session) -> None:
        """Serve until the verifier has sent its last step and got the answer.

        Raises:
            InvalidArgumentError: For a malformed message, or a second one of an unanswered step.
            QueueFullError: If too many steps or bytes are unanswered.
            EngineFailureError: If the engine ended the session.
            TimeoutError: If no whole message came for SILENCE_S.
        """
        self._session = session
        if self._channel is not None:
            read = partial(self._read_channel, self._channel)
            self._engine.post(partial(self._engine.watch, self._channel.fileno(), read))
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_steps())
        try:
            await asyncio.gather(reader, writer)
        except BaseException as error:
            self._error = error
            raise
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            # The error's traceback refers to this frame. Such a cycle would keep the stream's shared memory until the
            # next cycle collection, which may take minutes.
            del reader, writer

    def close(self) -> None:
        """Refuse further answers; thread-safe."""
        self._has_failed = True
        self._engine.post(self._close)

    def _close(self) -> None:
        # Both refer to this stream, and so to shared memory.
        error, self._error, self._session = self._error, None, None
        self._decoder.close()
        self._engine.later(partial(self._watch.end, error))
        if self._channel is not None:
            self._engine.unwatch(self._channel.fileno())
            self._channel.close()

    def _read_channel(self, channel: Channel) -> list[Callable[[], None]] | None:
        """Return commands that take the received messages; on the engine's thread."""
        try:
            return None if self._has_failed else [partial(self._take_record, one) for one in channel.receive()]
        except ConnectionError:
            return None

    async def _read_steps(self) -> None:
        while (request := await self._read()) is not grpc.aio.EOF:
            if request.WhichOneof("message") == "keep_alive":
                continue
            step = request.commit if request.WhichOneof("message") == "commit" else request.step
            if step.step_id in self._unanswered:  # else the limits would not count the message
                raise InvalidArgumentError("step_id", step.step_id, "has no answer yet: it rises by 1")
            self._make_room(step.step_id, last_read_bytes.get())
            self._engine.post(partial(self._take, request))
        self._engine.post(self._end_steps)

    async def _read(self) -> Any:
        """Return the next message of the verifier, or grpc.aio.EOF."""
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self._context.read()
        except TimeoutError:
            pass  # the error below must not refer to this exception
        due = f"a verifier sends one every {KEEP_ALIVE_S:g} s"
        raise TimeoutError(f"no whole message has arrived within {SILENCE_S:g} s; {due}")

    def _end_steps(self) -> None:
        self._all_read = True
        self._settle(0)

    def _take_record(self, record: Record) -> None:
        message, body = record.message, record.body
        try:
            request = pb.DraftRequest.FromString(message)
        except DecodeError:
            self._fail(InvalidArgumentError("message", f"{len(message)} bytes", "must be a DraftRequest"))
            return
        self._engine.later(partial(self._traffic.count_message, "direct", "received", request, len(message)))
        if request.WhichOneof("message") == "announce":
            self._announce(request.announce, body)
            return
        if body is not None:
            body.release()
        self._take(request, len(message))

    def _announce(self, announce: pb.Announce, body: Body | None) -> None:
        """Check an announced step and pass it to the engine, on the engine's thread."""
        if self._has_failed:
            return
        try:
            assert self._session is not None
            step = self._decoder.decode_announce(announce, body)
            step.show = partial(self._show_early, step.announced_id)
            self._engine.announce(self._session, step)
        except (InvalidArgumentError, QueueFullError) as error:
            self._fail(error)
        except Exception as error:  # as in `_take`
            logger.exception("an announced step could not be read")
            self._fail(EngineFailureError(f"an announced step could not be read: {error}"))

    def _show_early(self, announced_id: int, drafts: torch.Tensor) -> None:
        """Write early drafts to the channel, on the engine's thread."""
        if not self._is_direct or self._channel is None or not self._channel.takes_numbers:
            return
        response = pb.DraftResponse(early=pb.EarlyDrafts(announced_id=announced_id))
        message = response.SerializeToString()
        if self._channel.send(message, drafts):
            self._engine.later(partial(self._traffic.count_message, "direct", "sent", response, len(message)))

    def _take(self, request: pb.DraftRequest, message_bytes: int = 0) -> None:
        """Check a step and queue it, on the engine's thread."""
        if self._has_failed:
            return
        try:
            step = self._decoder.decode(request)
            carrier, num_bytes = step.features.carrier, len(step.tokens) * self._decoder.row_bytes
            # The answer's bytes count too, so that answers of a verifier that does not read them cannot pile up.
            size = message_bytes
            if self._answer_row_bytes:
                size += self._answer_row_bytes * int(step.num_drafts.sum())
            if carrier != pb.CARRIER_BYTES:
                size += num_bytes
            self._make_room(step.step_id, size)
            message = request.step if step.announced is None else request.commit
            self._sender.release(message.logits_read, "logits_read")
            assert self._session is not None
            self._engine.submit(self._session, step)
            self._engine.later(partial(self._note_step, message, carrier, num_bytes))
        except (InvalidArgumentError, QueueFullError) as error:
            self._fail(error)
        except Exception as error:  # any error ends this stream alone
            logger.exception("a step could not be read")
            self._fail(EngineFailureError(f"a step could not be read: {error}"))

    def _note_step(self, step: pb.DraftStep | pb.Commit, carrier: pb.Carrier, num_bytes: int) -> None:
        """Count a step's features, and record its sequences for logs and traces."""
        self._traffic.count_tensor(carrier, "received", "features", num_bytes)
        self._watch.take_step(step)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._loop.call_soon_threadsafe(self._answers.put_nowait, error)

    def _make_room(self, step_id: int, size: int) -> None:
        """Count a step and its bytes until its answer; raise QueueFullError for too many unanswered steps or bytes."""
        with self._lock:
            own = self._unanswered.get(step_id)
            if own is None and len(self._unanswered) >= MAX_UNANSWERED_STEPS:
                raise QueueFullError(f"{MAX_UNANSWERED_STEPS} steps are unanswered, and no more are taken")
            is_alone = len(self._unanswered) == (own is not None)
            if not is_alone and self._unanswered_bytes + size > MAX_UNANSWERED_BYTES:
                raise QueueFullError(f"steps of {MAX_UNANSWERED_BYTES} bytes are unanswered, and no more are taken")
            self._unanswered[step_id] = (own or 0) + size
            self._unanswered_bytes += size

    def _settle(self, step_id: int) -> None:
        """Count an answered step, and end the stream after the last one."""
        with self._lock:
            self._unanswered_bytes -= self._unanswered.pop(step_id, 0)
            is_last = self._all_read and not self._unanswered
        if is_last:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, None)

    def _send_directly(self, response: Encoded) -> bool:
        """Send a response over the channel; return False if this or an earlier response must go over the stream."""
        if self._is_direct and self._channel is not None:
            self._is_direct = self._channel.send(response.data)
            if self._is_direct:
                self._traffic.count_message("direct", "sent", response.message, len(response.data))
        return self._is_direct

    def _encode(self, answer: Answer) -> Encoded:
        return answer.encode(self._receiver.generation_read)

    async def _write_answers(self) -> None:
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Exception):
                try:
                    raise answer
                finally:
                    del answer  # else a reference cycle with this frame
            if isinstance(answer, pb.Draining):
                await self._context.write(pb.DraftResponse(draining=answer))
                continue
            response = self._encode(answer)
            if not self._send_directly(response):
                await self._context.write(response)
            self._settle(answer.step_id)
