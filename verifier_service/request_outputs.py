"""What becomes of the tokens that steps draw: committed at once, handed out when there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draftwire.errors import DraftwireError, ServerError
from draftwire.v1 import generate_pb2
from verifier_service.drafting import Drafting
from verifier_service.emission import Emission
from verifier_service.output_queue import Item, OutputQueue
from verifier_service.request import Request
from verifier_service.request_metrics import RequestMetrics
from verifier_service.sampler import Drawn
from verifier_service.scheduler import Scheduler, Work
from verifier_service.stop_conditions import Piece


class RequestOutputs:
    """Commits tokens, counts them and hands them out, and ends requests. Used by the engine's thread alone.

    Drafters wait for what is committed. So the rest is done later, by `count` and `hand_out`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        metrics: RequestMetrics,
        deliver: Callable[[list[tuple[Request, Item]]], None],
        release: Callable[[Request], None],
        *,
        is_synthetic: bool,
    ) -> None:
        """`release` drops what others keep of a request that has ended; `deliver`: see `OutputQueue`."""
        self._scheduler = scheduler
        self._drafting = drafting
        self._metrics = metrics
        self._release = release
        self._is_synthetic = is_synthetic
        self._queue = OutputQueue(deliver, metrics)
        # Of requests that go on, by the step committed last; pieces of plain tokens are made when they are queued.
        self._emitted: list[tuple[Work, Drawn, Piece | None]] = []
        self._drawn_at = 0.0  # monotonic time
        self._uncounted: list[tuple[Work, Drawn, Piece | None]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether there is anything to be handed out."""
        return self._queue.is_waiting or bool(self._emitted)

    @property
    def has_errors(self) -> bool:
        """Whether there is an error among it."""
        return self._queue.has_errors

    def commit(self, works: Sequence[Work], drawn: Sequence[Drawn], now: float) -> None:
        """Takes a step, with what was `drawn` by the monotonic time `now` for each work that samples.

        Drafts past the accepted ones are rolled back by length.
        """
        results = iter(drawn)
        emitted: list[tuple[Work, Drawn, Piece | None]] = []
        for work in works:
            result = next(results) if work.samples else None
            work.request.is_foretold = False
            if not work.is_current:
                continue
            work.request.num_in_flight -= 1
            if result is None:
                work.request.num_computed = work.start + len(work.tokens)
            else:
                self._commit(work, result, now, emitted)
        self._emitted, self._drawn_at = emitted, now

    def _commit(
        self, work: Work, drawn: Drawn, now: float, emitted: list[tuple[Work, Drawn, Piece | None]]
    ) -> None:
        request, tokens = work.request, drawn.tokens
        if work.is_decoding:
            if work.num_drafts == 0 and tokens:
                cause = self._drafting.fallback_cause(request) if work.cause is None else work.cause
                self._metrics.count_fallback(cause)
            request.num_computed = work.start + len(tokens)
        else:
            request.num_computed = work.start + len(work.tokens)
        if not tokens:
            self.fail(request, ServerError("the target's logits are not finite for this request"))
            return
        if request.first_token is None:
            request.first_token = now
        room, piece = request.max_length - len(request.tokens), None
        if not request.stops.takes_all(tokens, room):
            piece = request.stops.take(tokens, room)
            tokens = piece.token_ids
        request.tokens += tokens
        has_ended = piece is not None and piece.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        if not (has_ended or request.stops.has_stop_texts):
            emitted.append((work, drawn, piece))
            return
        self._count(work, drawn)
        statistics = request.statistics(self._is_synthetic)
        self._queue.add(Emission(work, drawn, Piece(tokens) if piece is None else piece, now, statistics))
        if has_ended:
            self.forget(request)

    def cancel(self, request: Request, reason: str, output_tokens: int) -> None:
        """Ends a request, if it has not ended, for one of `FINISHED_REASONS` that only its client's side knows.

        `output_tokens` are those that the client gets of a request that a stop text ends.
        """
        if request in self._scheduler.running or request in self._scheduler.waiting:
            self._metrics.count_end(reason, time.monotonic() - request.arrived)
            if request.first_token is not None and request.last_output is not None and output_tokens:
                self._metrics.observe_decode(request.last_output - request.first_token, output_tokens)
        self.forget(request)

    def fail(self, request: Request, error: DraftwireError) -> None:
        """Ends a request with an error."""
        self._queue.add_error(request, error)
        self._metrics.count_end("error", time.monotonic() - request.arrived)
        self.forget(request, has_failed=True)

    def refuse(self, request: Request, error: DraftwireError) -> None:
        """Answers a request that was not taken, or that ends with its engine."""
        self._queue.add_error(request, error)

    def forget(self, request: Request, *, has_failed: bool = False) -> None:
        """Ends a request without further output."""
        self._scheduler.remove(request, has_failed=has_failed)
        self._release(request)

    def count(self) -> None:
        """Counts what the last step has verified."""
        self._queue_emitted()
        for work, drawn, _ in self._uncounted:
            self._count(work, drawn)
        self._uncounted.clear()

    def _count(self, work: Work, drawn: Drawn) -> None:
        num_emitted = len(drawn.tokens)
        if work.is_decoding:
            work.request.count_step(work.num_drafts, num_emitted)
            self._metrics.count_step(work.num_drafts, num_emitted - 1)
            if work.num_drafts > 0:
                self._drafting.count_verified(work.request, work.num_drafts, num_emitted - 1)

    def hand_out(self) -> None:
        """Turns the output of steps into messages."""
        self._queue_emitted()
        self._queue.hand_out()

    def _queue_emitted(self) -> None:
        self._uncounted += self._emitted
        for work, drawn, piece in self._emitted:
            self._queue.add(Emission(work, drawn, Piece(drawn.tokens) if piece is None else piece, self._drawn_at))
        self._emitted = []
