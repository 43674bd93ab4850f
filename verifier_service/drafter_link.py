"""The stream to one drafter: connection, handshake, reconnection. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import torch

from draftwire.errors import InvalidArgumentError, MismatchError
from draftwire.tensors import DTYPES, decode_tensor
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2
from draftwire.version import PROTOCOL_VERSION
from draftwire.wire import CHANNEL_OPTIONS
from draftwire_kernels import NOISE_VERSION
from verifier_service.target import Target

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 5.0


@dataclass(frozen=True)
class HeadInfo:
    """What the verifier needs to know of a connected drafter's head."""

    fingerprint: str
    layers: tuple[int, ...]
    dtype: torch.dtype  # of the features on the wire
    draft_vocab_size: int
    draft_token_ids: torch.Tensor | None  # int64 [draft_vocab_size], None when the vocabularies are equal
    max_drafts: int
    max_sequences: int


@dataclass(frozen=True, eq=False)
class Connected:
    """Event: a stream is open. Each stream is a new `Stream` object."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Disconnected:
    """Event: a stream has ended."""

    stream: Stream


@dataclass(frozen=True, eq=False)
class Answered:
    """Event: a drafter has answered a step."""

    stream: Stream
    drafts: draft_pb2.Drafts


LinkEvent = Connected | Disconnected | Answered


class Stream:
    """One open stream, as the engine's thread sees it."""

    def __init__(self, address: str, head: HeadInfo, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.head = head
        self.outbox: asyncio.Queue[draft_pb2.DraftRequest | None] = asyncio.Queue()
        self.failure: str | None = None
        self.expelled = False
        self._loop = loop

    def send(self, step: draft_pb2.DraftStep) -> None:
        """Queues a step; from any thread, never blocks."""
        self._put(draft_pb2.DraftRequest(step=step))

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """Ends the stream; from any thread. An expelled drafter is not asked again."""
        self.failure = self.failure or reason
        self.expelled = self.expelled or expel
        self._put(None)

    def _put(self, message: draft_pb2.DraftRequest | None) -> None:
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, message)


class DrafterLink:
    """Keeps a stream to one drafter open for as long as the verifier runs."""

    def __init__(
        self,
        address: str,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        max_sequences: int,
        post: Callable[[LinkEvent], None],
    ) -> None:
        self.status = generate_pb2.DrafterStatus(address=address, state=generate_pb2.DRAFTER_STATE_CONNECTING)
        self._address = address
        self._target = target
        self._config = config
        self._max_sequences = max_sequences
        self._post = post

    async def run(self) -> None:
        """Connects, serves and reconnects until cancelled."""
        delay = BACKOFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._serve()
            except MismatchError as error:
                self._note(generate_pb2.DRAFTER_STATE_REFUSED, str(error))
                delay = REFUSED_RETRY_S
            except (grpc.aio.AioRpcError, InvalidArgumentError, TimeoutError) as error:
                status = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                refused = status == grpc.StatusCode.FAILED_PRECONDITION
                state = generate_pb2.DRAFTER_STATE_REFUSED if refused else generate_pb2.DRAFTER_STATE_CONNECTING
                self._note(state, _text(error))
                served = time.monotonic() - began > CONNECT_TIMEOUT_S
                delay = REFUSED_RETRY_S if refused else BACKOFF_S[0] if served else min(2 * delay, BACKOFF_S[1])
            await asyncio.sleep(delay * random.uniform(0.5, 1))

    def _note(self, state: generate_pb2.DrafterState, detail: str) -> None:
        if detail != self.status.detail:
            logger.warning("drafter %s: %s", self._address, detail)
        self.status.state, self.status.detail = state, detail

    async def _serve(self) -> None:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = draft_pb2_grpc.DraftingStub(channel)
            info = await stub.GetDrafterInfo(draft_pb2.GetDrafterInfoRequest(), timeout=CONNECT_TIMEOUT_S)
            self._check(info)
            call = stub.Draft()
            await call.write(draft_pb2.DraftRequest(hello=self._hello(info)))
            answer = await asyncio.wait_for(call.read(), CONNECT_TIMEOUT_S)
            if not isinstance(answer, draft_pb2.DraftResponse) or answer.WhichOneof("message") != "hello":
                await call.wait_for_connection()
                raise MismatchError("the drafter's first message is not a hello")
            stream = Stream(self._address, _head_info(answer.hello), asyncio.get_running_loop())
            self.status.head_fingerprint = stream.head.fingerprint
            self._note(generate_pb2.DRAFTER_STATE_READY, "")
            logger.info("drafter %s: connected, head %s", self._address, stream.head.fingerprint)
            self._post(Connected(stream))
            writer = asyncio.create_task(_write(call, stream))
            try:
                while isinstance(answer := await call.read(), draft_pb2.DraftResponse):
                    self._post(Answered(stream, answer.drafts))
                if stream.failure is not None:
                    raise MismatchError(stream.failure) if stream.expelled else TimeoutError(stream.failure)
                raise grpc.aio.AioRpcError(
                    await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
                )
            except asyncio.CancelledError:
                # Our own cancellation of the call surfaces here as well.
                if stream.failure is None:
                    raise
                raise (MismatchError if stream.expelled else TimeoutError)(stream.failure) from None
            finally:
                writer.cancel()
                call.cancel()
                self._post(Disconnected(stream))

    def _check(self, info: draft_pb2.GetDrafterInfoResponse) -> None:
        """Refuses a drafter that cannot serve this target, with both sides' values."""
        config = self._config
        pairs = [
            ("protocol_version", PROTOCOL_VERSION, info.protocol_version),
            ("noise_version", NOISE_VERSION, info.noise_version),
            ("vocab_size", self._target.vocab_size, info.target_vocab_size),
            ("hidden_size", self._target.hidden_size, info.target_hidden_size),
        ]
        if info.target_num_layers:
            pairs.append(("num_layers", self._target.num_layers, info.target_num_layers))
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise MismatchError(f"{name} does not match: verifier {ours}, drafter {theirs}")
        if config.HasField("method") and config.method != info.method:
            raise MismatchError(f"method does not match: verifier {config.method!r}, drafter {info.method!r}")
        layers = list(info.features.layers)
        if not layers or max(layers) > self._target.num_layers or info.features.dtype not in DTYPES:
            raise MismatchError(
                f"features cannot be made: the head takes layers {layers} as dtype {info.features.dtype}, "
                f"the target has {self._target.num_layers} layers"
            )
        if config.num_speculative_tokens > info.max_num_speculative_tokens:
            raise MismatchError(
                f"num_speculative_tokens does not fit: verifier {config.num_speculative_tokens}, "
                f"drafter at most {info.max_num_speculative_tokens}"
            )

    def _hello(self, info: draft_pb2.GetDrafterInfoResponse) -> draft_pb2.VerifierHello:
        target = self._target
        return draft_pb2.VerifierHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            verifier=target.name[-128:],
            target=draft_pb2.TargetSpec(
                name=target.name,
                fingerprint=target.fingerprint,
                vocab_size=target.vocab_size,
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                max_model_len=target.max_model_len,
            ),
            features=draft_pb2.FeatureSpec(
                layers=info.features.layers,
                width=len(info.features.layers) * target.hidden_size,
                dtype=info.features.dtype,
            ),
            speculative_config=self._config,
            max_sequences=min(self._max_sequences, info.max_sequences),
            carriers=[draft_pb2.CARRIER_BYTES],
        )


async def _write(call: grpc.aio.StreamStreamCall, stream: Stream) -> None:
    """Sends what the engine queues; None ends the stream."""
    while (message := await stream.outbox.get()) is not None:
        await call.write(message)
    call.cancel()


def _head_info(hello: draft_pb2.DrafterHello) -> HeadInfo:
    info = hello.info
    token_ids = None
    if hello.HasField("draft_token_ids"):
        shape = (info.draft_vocab_size,)
        token_ids = decode_tensor(hello.draft_token_ids, "draft_token_ids", torch.int32, shape).to(torch.int64)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= info.target_vocab_size:
            raise MismatchError(f"draft_token_ids must be in [0, {info.target_vocab_size})")
    elif info.draft_vocab_size != info.target_vocab_size:
        raise MismatchError("draft_token_ids are missing, and the draft vocabulary is not the target's")
    return HeadInfo(
        fingerprint=info.head_fingerprint,
        layers=tuple(info.features.layers),
        dtype=DTYPES[info.features.dtype],
        draft_vocab_size=info.draft_vocab_size,
        draft_token_ids=token_ids,
        max_drafts=info.max_num_speculative_tokens,
        max_sequences=info.max_sequences,
    )


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
