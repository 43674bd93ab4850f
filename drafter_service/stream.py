"""One stream of a verifier after its hello: steps in, drafts out."""

from __future__ import annotations

import asyncio

import grpc

from drafter_service.answer import Answer
from drafter_service.engine_thread import EngineThread
from drafter_service.sequence_watch import SequenceWatch
from drafter_service.session import Session
from drafter_service.step_decoder import StepDecoder
from draftwire.carriers import TensorReceiver, TensorSender
from draftwire.errors import QueueFullError
from draftwire.v1 import draft_pb2 as pb

MAX_UNANSWERED_STEPS = 64
MAX_UNANSWERED_BYTES = 512 * 1024 * 1024

Context = grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse]


class DraftStream:
    """Reads and checks steps, hands them to the engine and writes its answers; bounds what is unanswered."""

    def __init__(
        self,
        context: Context,
        decoder: StepDecoder,
        engine: EngineThread,
        receiver: TensorReceiver,
        sender: TensorSender,
        watch: SequenceWatch,
        answer_row_bytes: int,
    ) -> None:
        """`receiver` takes features, `sender` sends draft logits, `answer_row_bytes` of each draft; `watch` tells what
        becomes of the sequences.
        """
        self._context = context
        self._decoder = decoder
        self._engine = engine
        self._receiver = receiver
        self._sender = sender
        self._watch = watch
        self._answer_row_bytes = answer_row_bytes
        self._loop = asyncio.get_running_loop()
        # None: the last step is read.
        self._answers: asyncio.Queue[Answer | pb.Draining | Exception | None] = asyncio.Queue()
        self._all_read = False
        self._unanswered: dict[int, int] = {}  # step id -> bytes of its message, features and answer
        self._unanswered_bytes = 0

    def deliver(self, answer: Answer | Exception) -> None:
        """Takes an answer, or the error that ended the session, from the engine's thread."""
        if isinstance(answer, Answer):
            answer.begin_sending(self._sender)
        self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def drain(self, timeout_s: float) -> None:
        """Tells the verifier that the drafter ends this stream in so many seconds, if it does not do so itself."""
        self._answers.put_nowait(pb.Draining(timeout_s=timeout_s))

    async def run(self, session: Session) -> None:
        """Serves until the verifier has sent its last step and has its answer.

        Raises
        ------
        InvalidArgumentError
            For a malformed message.
        QueueFullError
            When the verifier sends faster than it is answered.
        EngineFailureError
            When the engine gave up the session.
        """
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_steps(session))
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._watch.end(error)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read_steps(self, session: Session) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            step = self._decoder.decode(request)
            # What the answer takes counts too: a verifier that does not read it must not have it pile up here.
            size = request.ByteSize() + sum(request.step.num_drafts) * self._answer_row_bytes
            self._check_room(size)
            self._watch.take_step(request.step)
            self._sender.release(request.step.logits_read, "logits_read")
            if request.step.features.HasField("span"):
                size += step.features.num_bytes
            self._unanswered[step.step_id] = size
            self._unanswered_bytes += size
            self._engine.submit(session, step)
        self._all_read = True
        self._answers.put_nowait(None)

    def _check_room(self, size: int) -> None:
        if len(self._unanswered) >= MAX_UNANSWERED_STEPS:
            raise QueueFullError(f"{MAX_UNANSWERED_STEPS} steps are unanswered, and no more are taken")
        if self._unanswered and self._unanswered_bytes + size > MAX_UNANSWERED_BYTES:
            raise QueueFullError(f"steps of {MAX_UNANSWERED_BYTES} bytes are unanswered, and no more are taken")

    async def _write_answers(self) -> None:
        while not self._all_read or self._unanswered:
            answer = await self._answers.get()
            if answer is None:
                continue
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, pb.Draining):
                await self._context.write(pb.DraftResponse(draining=answer))
                continue
            self._watch.take_answer(answer)
            response = answer.encode()
            response.drafts.features_read = self._receiver.generation_read
            await self._context.write(response)
            self._unanswered_bytes -= self._unanswered.pop(answer.step_id)
