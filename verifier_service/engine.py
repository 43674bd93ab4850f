"""The verifier's engine: one thread that schedules, runs the target, draws tokens and keeps the drafters fed."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftwire.devices import make_current
from draftwire.errors import DraftwireError, QueueFullError, ServerError
from draftwire.kv_cache import BlockPool, KVCache, RaggedBatch, SequenceRows
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.drafter_link import Connected, LinkEvent, Stream
from verifier_service.drafting import Drafting
from verifier_service.features import FeatureStore
from verifier_service.output import Piece
from verifier_service.request import Request
from verifier_service.sampler import Drawn, TokenSampler
from verifier_service.scheduler import Scheduler, Work
from verifier_service.target import Target

logger = logging.getLogger(__name__)

# What the engine hands to a request's sink.
Item = generate_pb2.GenerateResponse | DraftwireError


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine."""

    max_num_seqs: int
    max_queue: int
    max_prefill_rows: int  # rows of prompts in one step
    num_blocks: int
    draft_deadline_s: float | None  # None waits until a drafter answers or is lost


@dataclass(frozen=True, eq=False)
class _Arrived:
    request: Request


@dataclass(frozen=True, eq=False)
class _Cancelled:
    request: Request


class Engine:
    """Continuous batching with verification of drafts.

    One step: take what has happened, schedule rows, run the target over them, draw tokens, tell the drafters, hand out
    the output. All state belongs to the engine's thread; others reach it through `submit`, `cancel` and `post`.
    """

    def __init__(
        self,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        limits: EngineLimits,
        deliver: Callable[[list[tuple[Request, Item]]], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Both are called in the engine's thread and must not block: `deliver` with a step's output, `on_failure` when
        the engine has failed for good and its requests have their error.
        """
        self._target = target
        self._limits = limits
        self._deliver = deliver
        self._on_failure = on_failure
        self._is_synthetic = config.rejection_sample_method == config_pb2.REJECTION_SAMPLE_METHOD_SYNTHETIC
        self._pool = BlockPool(limits.num_blocks)
        self._cache = KVCache(target.layer_shapes, limits.num_blocks, target.dtype, target.device)
        self._stores: dict[tuple[int, ...], FeatureStore] = {}
        self._sampler = TokenSampler(
            config, target.vocab_size, target.eos_token_ids, limits.max_num_seqs, target.device
        )
        self.scheduler = Scheduler(self._pool, limits.max_num_seqs, limits.max_queue, limits.max_prefill_rows)
        self.drafting = Drafting(config, target.vocab_size, limits.draft_deadline_s, target.device)
        self._events: queue.SimpleQueue[_Arrived | _Cancelled | LinkEvent | None] = queue.SimpleQueue()
        self._items: list[tuple[Request, Item]] = []
        self._ended: str | None = None  # why the thread takes no more requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that are left get an error."""
        self._events.put(None)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Hands a request over; its sink gets the output or the error."""
        self._events.put(_Arrived(request))
        if self._ended is not None:
            self._refuse_arrived()

    def cancel(self, request: Request) -> None:
        """Ends a request without further output."""
        self._events.put(_Cancelled(request))

    def post(self, event: LinkEvent) -> None:
        """Hands over what happened on a drafter's stream."""
        self._events.put(event)

    def _run(self) -> None:
        make_current(self._target.device)
        reason = "the server is shutting down"
        try:
            self._loop()
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {error}"
            self._on_failure()
        self._ended = reason
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._items.append((request, ServerError(reason)))
        self._hand_out()
        self._refuse_arrived()

    def _refuse_arrived(self) -> None:
        """Ends the requests that nobody will take any more; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, _Arrived):
                    self._deliver([(event.request, ServerError(str(self._ended)))])

    def _loop(self) -> None:
        works: list[Work] = []
        while self._take_events(wait=not works):
            works = []
            try:
                self.drafting.drop_lost()
                self.drafting.flush(self.scheduler.running, self._stores)
                works = self.scheduler.schedule(self.drafting.is_ready)
                if works:
                    self._step(works)
            except Exception as error:
                logger.exception("the step failed; its requests are ended")
                for request in [work.request for work in works] or list(self.scheduler.running):
                    if request.blocks:
                        self._end(request, ServerError(f"the step failed: {error}"))
            self._hand_out()

    def _take_events(self, wait: bool) -> bool:
        """Takes all events; with `wait`, until there is one or a deadline passes. False when it is time to stop."""
        timeout = None
        if wait:
            deadline = self.drafting.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = self._events.get(block=wait, timeout=timeout)
            while event is not None:
                self._take(event)
                event = self._events.get_nowait()
            return False
        except queue.Empty:
            return True

    def _take(self, event: _Arrived | _Cancelled | LinkEvent) -> None:
        if isinstance(event, _Arrived):
            try:
                self.scheduler.add(event.request)
            except QueueFullError as error:
                self._items.append((event.request, error))
        elif isinstance(event, _Cancelled):
            self._forget(event.request)
        elif not isinstance(event, Connected) or self._has_store(event.stream):
            self.drafting.handle(event)
            self._drop_unused_stores()

    def _has_store(self, stream: Stream) -> bool:
        """Whether there is a store of the features that a new stream needs; makes it."""
        layers = stream.head.layers
        if layers not in self._stores:
            try:
                store = FeatureStore(self._target, layers, self._limits.num_blocks, self.scheduler.running)
            except (RuntimeError, MemoryError) as error:  # what torch raises on a CPU and on a GPU without memory
                stream.fail(f"there is no memory for the features of its layers {list(layers)}: {error}")
                return False
            self._stores[layers] = store
        return True

    def _drop_unused_stores(self) -> None:
        """Frees the features that no drafter takes any more, but for the last ones: their drafter may come back."""
        used = self.drafting.feature_layers
        if used:
            self._stores = {layers: store for layers, store in self._stores.items() if layers in used}

    def _step(self, works: Sequence[Work]) -> None:
        logits = self._forward(works)
        sampling = [work for work in works if work.samples]
        drawn = self._sampler.draw(sampling, logits) if sampling else []
        for work in works:
            if not work.samples:
                work.request.num_computed = work.start + len(work.tokens)
        for work, result in zip(sampling, drawn, strict=True):
            self._commit(work, result)
        # Drafters go to work before the output is turned into text.
        self.drafting.flush(self.scheduler.running, self._stores)
        for work, result in zip(sampling, drawn, strict=True):
            try:
                self._emit(work, result)
            except Exception as error:  # a tokenizer that fails on one request's tokens
                logger.exception("request %s: its output cannot be decoded", work.request.request_id)
                self._end(work.request, ServerError(f"the output cannot be decoded: {error}"))

    def _forward(self, works: Sequence[Work]) -> torch.Tensor:
        """Runs the rows of `works`; logits [R, V] of the rows that sample."""
        device = self._target.device
        batch = RaggedBatch([SequenceRows(w.request.blocks, w.start, len(w.tokens)) for w in works], device)
        ends = list(accumulate(len(work.tokens) for work in works))
        rows = [row for work, end in zip(works, ends, strict=True) for row in range(end - work.num_logit_rows, end)]
        token_ids = torch.tensor([token for work in works for token in work.tokens])
        positions = torch.cat([torch.arange(work.start, work.start + len(work.tokens)) for work in works])
        logits = self._target.forward(
            token_ids.to(device, non_blocking=True),
            positions.to(device, non_blocking=True),
            self._cache,
            batch,
            torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
        )
        for store in self._stores.values():
            store.capture(batch)
        return logits

    def _commit(self, work: Work, drawn: Drawn) -> None:
        """Appends the drawn tokens to the request; drafts past the accepted ones are rolled back by length."""
        request = work.request
        if request.is_decoding:
            request.count_step(work.num_drafts, len(drawn.tokens))
            request.num_computed = work.start + len(drawn.tokens)
        else:
            request.num_computed = len(request.prompt)
        request.tokens += drawn.tokens

    def _emit(self, work: Work, drawn: Drawn) -> None:
        request = work.request
        if not drawn.tokens:
            self._end(request, ServerError("the target's logits are not finite for this request"))
            return
        before = len(request.tokens) - len(drawn.tokens)
        piece = request.output.push(drawn.tokens, request.max_length - before)
        count = len(piece.token_ids)
        del request.tokens[before + count :]
        if request.first_token is None:
            request.first_token = time.monotonic()
        response = _response(work, piece, drawn)
        if piece.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED:
            response.statistics.CopyFrom(request.statistics(self._is_synthetic))
            self._forget(request)
        self._items.append((request, response))

    def _end(self, request: Request, error: DraftwireError) -> None:
        self._items.append((request, error))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.drafting.release(request)
        self._sampler.forget(request)
        for store in self._stores.values():
            store.forget(request)

    def _hand_out(self) -> None:
        if self._items:
            self._deliver(self._items)
            self._items = []


def _response(work: Work, piece: Piece, drawn: Drawn) -> generate_pb2.GenerateResponse:
    count = len(piece.token_ids)
    num_accepted = min(work.num_drafts, len(drawn.tokens) - 1)
    return generate_pb2.GenerateResponse(
        token_ids=piece.token_ids,
        text=piece.text,
        drafted=[j < num_accepted for j in range(count)],
        logprobs=drawn.logprobs[:count],
        finish_reason=piece.finish_reason,
        stop_text=piece.stop_text,
        stop_token_id=piece.stop_token_id,
        token_text_ends=piece.text_ends,
    )
