"""The stream to one drafter: connection, handshake, reconnection. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from draftwire import config as cfg
from draftwire.errors import InvalidArgumentError, MismatchError
from draftwire.tensors import DTYPES, WIRE_DTYPES, decode_tensor
from draftwire.v1 import config_pb2, draft_pb2, draft_pb2_grpc, generate_pb2
from draftwire.version import PROTOCOL_VERSION
from draftwire.wire import CHANNEL_OPTIONS
from draftwire_kernels import NOISE_VERSION
from verifier_service.target import Target

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 5.0
EXPELLED_RETRY_S = 300.0
# Feature rows of more states than this are no head's.
MAX_FEATURE_LAYERS = 16
FEATURE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadInfo:
    """What the verifier needs to know of a connected drafter's head."""

    fingerprint: str
    layers: tuple[int, ...]
    dtype: torch.dtype  # of the features on the wire
    draft_vocab_size: int
    draft_token_ids: torch.Tensor | None  # int64 [draft_vocab_size], None when the vocabularies are equal
    row_bytes: int  # of a feature row on the wire
    max_drafts: int
    max_sequences: int
    max_model_len: int


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


_Call = grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]
LinkEvent = Connected | Disconnected | Answered


class Stream:
    """One open stream, as the engine's thread sees it."""

    def __init__(self, address: str, head: HeadInfo, cancel: Callable[[], object]) -> None:
        self.address = address
        self.head = head
        self.outbox: asyncio.Queue[draft_pb2.DraftStep] = asyncio.Queue()
        self.failure: str | None = None
        self.is_expelled = False
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    def send(self, step: draft_pb2.DraftStep) -> None:
        """Queues a step; from any thread, never blocks."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, step)

    def fail(self, reason: str, *, expel: bool = False) -> None:
        """Ends the stream at once; from any thread. An expelled drafter is left alone for minutes."""
        if self.failure is None:
            self.failure, self.is_expelled = reason, expel
            self._loop.call_soon_threadsafe(self._cancel)


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
            except _ExpelledError as error:
                self._note(generate_pb2.DRAFTER_STATE_REFUSED, f"expelled: {error}")
                delay = EXPELLED_RETRY_S
            except Exception as error:
                if _is_refusal(error):
                    self._note(generate_pb2.DRAFTER_STATE_REFUSED, _text(error))
                    delay = REFUSED_RETRY_S
                else:
                    if not isinstance(error, (grpc.aio.AioRpcError, TimeoutError)):
                        logger.exception("drafter %s: the stream failed", self._address)
                    self._note(generate_pb2.DRAFTER_STATE_CONNECTING, _text(error))
                    has_served = time.monotonic() - began > CONNECT_TIMEOUT_S
                    delay = BACKOFF_S[0] if has_served else min(2 * delay, BACKOFF_S[1])
            await asyncio.sleep(delay * random.uniform(0.5, 1))

    def _note(self, state: generate_pb2.DrafterState, detail: str) -> None:
        if detail and detail != self.status.detail:
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
            if not isinstance(answer, draft_pb2.DraftResponse):
                raise await _ending(call)
            stream = Stream(self._address, self._accept(answer), call.cancel)
            self.status.head_fingerprint = stream.head.fingerprint
            self._note(generate_pb2.DRAFTER_STATE_READY, "")
            logger.info("drafter %s: connected, head %s", self._address, stream.head.fingerprint)
            self._post(Connected(stream))
            writer = asyncio.create_task(_write(call, stream))
            try:
                while isinstance(answer := await call.read(), draft_pb2.DraftResponse):
                    self._post(Answered(stream, answer.drafts))
                raise await _ending(call)
            except (asyncio.CancelledError, grpc.aio.AioRpcError) as error:
                # A stream that the engine fails ends as a cancelled call; a task that is cancelled is to end.
                task = asyncio.current_task()
                if stream.failure is None or (task is not None and task.cancelling()):
                    raise
                kind = _ExpelledError if stream.is_expelled else TimeoutError
                raise kind(stream.failure) from error
            finally:
                writer.cancel()
                call.cancel()
                self._post(Disconnected(stream))

    def _accept(self, answer: draft_pb2.DraftResponse) -> HeadInfo:
        """The head of a drafter's hello, checked again: it may have changed since the info call."""
        hello = answer.hello
        if answer.WhichOneof("message") != "hello" or hello.carrier != draft_pb2.CARRIER_BYTES:
            raise MismatchError(f"the drafter's first message must be a hello with carrier {draft_pb2.CARRIER_BYTES}")
        self._check(hello.info)
        return _head_info(hello, self._target.vocab_size)

    def _check(self, info: draft_pb2.GetDrafterInfoResponse) -> None:
        """Refuses a drafter that cannot serve this target, with both sides' values."""
        config = self._config
        pairs = [
            ("protocol_version", PROTOCOL_VERSION, info.protocol_version),
            ("vocab_size", self._target.vocab_size, info.target_vocab_size),
            ("hidden_size", self._target.hidden_size, info.target_hidden_size),
        ]
        if config.draft_sample_method == cfg.GUMBEL:
            pairs.append(("noise_version", NOISE_VERSION, info.noise_version))
        if info.target_num_layers:
            pairs.append(("num_layers", self._target.num_layers, info.target_num_layers))
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise MismatchError(f"{name} does not match: verifier {ours}, drafter {theirs}")
        if config.HasField("method") and config.method != info.method:
            raise MismatchError(f"method does not match: verifier {config.method!r}, drafter {info.method!r}")
        self._check_features(info.features)
        if config.num_speculative_tokens > info.max_num_speculative_tokens:
            raise MismatchError(
                f"num_speculative_tokens does not fit: verifier {config.num_speculative_tokens}, "
                f"drafter at most {info.max_num_speculative_tokens}"
            )
        logits = config.draft_logits
        if logits.form not in info.draft_logits_forms or logits.n > info.draft_vocab_size:
            raise MismatchError(
                f"draft_logits do not fit: verifier {cfg.draft_logits_text(logits)}, "
                f"drafter forms {list(info.draft_logits_forms)} of {info.draft_vocab_size} logits"
            )

    def _check_features(self, features: draft_pb2.FeatureSpec) -> None:
        layers = list(features.layers)
        is_known = len(layers) <= MAX_FEATURE_LAYERS and layers == sorted(set(layers))
        if not layers or not is_known or layers[-1] > self._target.num_layers:
            raise MismatchError(
                f"features do not fit: drafter layers {layers[:MAX_FEATURE_LAYERS]}, "
                f"verifier different ones of 0 to {self._target.num_layers}, ascending"
            )
        width = len(layers) * self._target.hidden_size
        if features.width != width or DTYPES.get(features.dtype) not in FEATURE_DTYPES:
            raise MismatchError(
                f"features do not fit: drafter width {features.width} of dtype {features.dtype}, "
                f"verifier width {width} of dtypes {[WIRE_DTYPES[dtype] for dtype in FEATURE_DTYPES]}"
            )

    def _hello(self, info: draft_pb2.GetDrafterInfoResponse) -> draft_pb2.VerifierHello:
        target = self._target
        return draft_pb2.VerifierHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            verifier=Path(target.name).name.encode()[:128].decode(errors="ignore"),
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


class _ExpelledError(Exception):
    """A drafter answered what it must not."""


async def _write(call: _Call, stream: Stream) -> None:
    """Sends what the engine queues."""
    while True:
        await call.write(draft_pb2.DraftRequest(step=await stream.outbox.get()))


async def _ending(call: _Call) -> Exception:
    """Why a stream has ended, or gives what cannot be read."""
    call.cancel()
    status = await call.code()
    details = await call.details() or "no details"
    return TimeoutError(f"{status.name}: {details}")


def _head_info(hello: draft_pb2.DrafterHello, vocab_size: int) -> HeadInfo:
    info = hello.info
    token_ids = None
    if hello.HasField("draft_token_ids"):
        shape = (info.draft_vocab_size,)
        token_ids = decode_tensor(hello.draft_token_ids, "draft_token_ids", torch.int32, shape).to(torch.int64)
        if not len(token_ids) or int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            raise MismatchError(f"draft_token_ids must be in [0, {vocab_size}), at least one")
    elif info.draft_vocab_size != vocab_size:
        raise MismatchError(
            f"draft_token_ids are missing: drafter vocabulary {info.draft_vocab_size}, {vocab_size} here"
        )
    return HeadInfo(
        fingerprint=info.head_fingerprint,
        layers=tuple(info.features.layers),
        dtype=DTYPES[info.features.dtype],
        draft_vocab_size=info.draft_vocab_size,
        draft_token_ids=token_ids,
        row_bytes=info.features.width * DTYPES[info.features.dtype].itemsize,
        max_drafts=info.max_num_speculative_tokens,
        max_sequences=info.max_sequences,
        max_model_len=info.max_model_len,
    )


def _is_refusal(error: Exception) -> bool:
    """Whether one side finds that the two do not fit."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() == grpc.StatusCode.FAILED_PRECONDITION
    return isinstance(error, (MismatchError, InvalidArgumentError))


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
