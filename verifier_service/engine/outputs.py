"""Commit sampled tokens at once; count and deliver them later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from draftwire.contract.errors import DraftwireError, ServerError
from draftwire.model.devices import check_context
from draftwire.server.logs import fields
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import SampledLogprobs, ScheduledRows
from verifier_service.core.request import Request
from verifier_service.core.stop_conditions import Piece
from verifier_service.drafters.drafting import Drafting
from verifier_service.engine.request_metrics import RequestMetrics
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.step import Step

logger = logging.getLogger(__name__)

# A request's output.
Item = generate_pb2.GenerateResponse | DraftwireError
Deliver = Callable[[list[tuple[Request, Item]]], None]

# Maximum number of steps in a row whose output is held back while the device waits for the host.
MOST_STEPS_HELD = 3


class RequestOutputs:
    """Commits tokens, counts and delivers them, and ends requests. Used only by the engine's thread.

    Drafters wait for committed tokens, so `count` and `deliver` do all other work later.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        metrics: RequestMetrics,
        deliver: Deliver,
        release: Callable[[Request], None],
        device: torch.device,
        *,
        is_synthetic: bool,
    ) -> None:
        """`deliver` takes messages and errors and must not block; `release` drops other state of an ended request."""
        self._scheduler = scheduler
        self._drafting = drafting
        self._metrics = metrics
        self._deliver = deliver
        self._release = release
        self._device = device
        self._is_synthetic = is_synthetic
        self._uncounted: list[ScheduledRows] = []
        self._undelivered: list[ScheduledRows] = []
        self._undelivered_prompts: list[tuple[Request, SampledLogprobs]] = []
        self._errors: list[tuple[Request, DraftwireError]] = []
        self._has_freed = False
        self._num_held = 0  # steps in a row

    @property
    def is_waiting(self) -> bool:
        """Return whether output or errors wait for delivery."""
        return bool(self._undelivered) or bool(self._undelivered_prompts) or bool(self._errors)

    @property
    def has_errors(self) -> bool:
        """Return whether an error waits for delivery."""
        return bool(self._errors)

    def commit(self, step: Step) -> None:
        """Append the sampled tokens of a step; rejected drafts are rolled back by length."""
        self._drafting.placement.note_causes(step.rows)
        for row in step.rows:
            row.request.is_announced = False
            if not row.is_current:
                continue
            row.request.num_in_flight -= 1
            if row.prompt_logprobs is not None:
                row.request.num_prompt_logprobs += row.num_prompt_logit_rows
                self._undelivered_prompts.append((row.request, row.prompt_logprobs))
            if row.samples:
                self._commit_tokens(row, step.committed_at)
            else:
                row.request.num_computed = row.start + len(row.tokens)

    def _commit_tokens(self, row: ScheduledRows, now: float) -> None:
        assert row.sampled is not None
        request, tokens = row.request, row.sampled.tokens
        row.sampled_at = now
        if row.is_decoding:
            if row.num_drafts == 0 and tokens:
                assert row.cause is not None
                self._metrics.count_fallback(row.cause)
            request.num_computed = row.start + len(tokens)
        else:
            request.num_computed = row.start + len(row.tokens)
        if request.grammar is not None and request.grammar.error is not None:
            self.fail(request, request.grammar.error)
            return
        if not tokens:
            text = (
                "no token can be drawn: the target's logits are not finite, or structured output, allowed_token_ids "
                "and bad words leave no token"
            )
            self.fail(request, ServerError(text))
            return
        if request.first_token is None:
            request.first_token = now
        room = request.max_length - len(request.tokens)
        if not request.stops.takes_all(tokens, room):
            row.piece = request.stops.cut(tokens, room)
            tokens = row.piece.token_ids
        request.tokens += tokens
        self._undelivered.append(row)
        has_ended = row.piece is not None and row.piece.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        if not (has_ended or request.stops.has_stop_texts):
            self._uncounted.append(row)
            return
        self._count(row)
        row.statistics = request.statistics(self._is_synthetic)
        if has_ended:
            self.forget(request)

    def cancel(self, request: Request, reason: str, output_tokens: int) -> None:
        """End a request for one of `FINISHED_REASONS` found by the client process, unless it has ended.

        `output_tokens` is the number of tokens that the client gets, for a request ended by a stop text.
        """
        if request in self._scheduler.running or request in self._scheduler.waiting:
            self._metrics.count_end(reason, time.monotonic() - request.arrived)
            if request.first_token is not None and request.last_output is not None and output_tokens:
                self._metrics.observe_decode(request.last_output - request.first_token, output_tokens)
        self.forget(request)

    def fail(self, request: Request, error: DraftwireError) -> None:
        """End a request with an error."""
        self._errors.append((request, error))
        self._metrics.count_end("error", time.monotonic() - request.arrived)
        self.forget(request, has_failed=True)

    def fail_step(self, requests: Iterable[Request], error: Exception) -> None:
        """End the requests of a failed step; raise RuntimeError if the device is lost, because all steps would fail."""
        failed = list(requests)
        request_ids = [request.request_id for request in failed]
        logger.exception("the step failed; its requests are ended", extra=fields(request_ids=request_ids))
        check_context(self._device)
        for request in failed:
            if request.blocks:
                self._has_freed = True
                self.fail(request, ServerError(f"the step failed: {error}"))

    def take_has_freed(self) -> bool:
        """Return whether a failed step has freed blocks since the last call."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def refuse(self, request: Request, error: DraftwireError) -> None:
        """Answer a request with an error, because it is not accepted or the engine ends."""
        self._errors.append((request, error))

    def deliver_error(self, request: Request, error: DraftwireError) -> None:
        """Deliver an error at once; from any thread, once the engine has ended."""
        self._deliver([(request, error)])

    def forget(self, request: Request, *, has_failed: bool = False) -> None:
        """End a request without further output."""
        self._scheduler.remove(request, has_failed=has_failed)
        self._release(request)

    def count(self) -> None:
        """Count the verified drafts of the last steps."""
        for row in self._uncounted:
            self._count(row)
        self._uncounted.clear()

    def _count(self, row: ScheduledRows) -> None:
        assert row.sampled is not None
        num_emitted = len(row.sampled.tokens)
        if row.is_decoding:
            row.request.count_step(row.num_drafts, num_emitted)
            self._metrics.count_step(row.num_drafts, num_emitted - 1)
            if row.offered is not None:
                self._drafting.budget.count(row.request, row.offered, row.num_drafts, num_emitted - 1)

    def deliver_behind(self, step: Step | None) -> None:
        """Deliver output while the device computes `step`, or hold it back until the next step.

        If `step` is late, the device waits for the host, and output is held back: one message for several steps takes
        less time of the interpreter, which this thread shares with the thread that writes messages.
        """
        is_late = step is not None and step.is_late
        self._num_held = self._num_held + 1 if is_late and self._num_held < MOST_STEPS_HELD else 0
        if self._num_held == 0:
            self.deliver()

    def deliver(self) -> None:
        """Deliver the output of committed steps as messages."""
        rows, self._undelivered = self._undelivered, []
        messages: list[list[ScheduledRows]] = []
        latest: dict[Request, list[ScheduledRows]] = {}
        for row in rows:
            if row.piece is None:
                assert row.sampled is not None
                row.piece = Piece(row.sampled.tokens)
            self._observe(row, row.piece)
            # The statistics of a message are those of its last token.
            if row.request in latest and latest[row.request][-1].statistics is None:
                latest[row.request].append(row)
            else:
                latest[row.request] = [row]
                messages.append(latest[row.request])
        items: list[tuple[Request, Item]] = [
            (request, generate_pb2.GenerateResponse(prompt_logprobs=logprobs.messages(len(logprobs.ranks))))
            for request, logprobs in self._undelivered_prompts
        ]
        self._undelivered_prompts = []
        items += [(steps[0].request, response(steps)) for steps in messages]
        items += self._errors
        self._errors = []
        if items:
            self._deliver(items)

    def _observe(self, row: ScheduledRows, piece: Piece) -> None:
        request, count = row.request, len(piece.token_ids)
        if request.last_output is None:
            self._metrics.observe_first(row.sampled_at - request.arrived, len(request.prompt), count)
        else:
            self._metrics.observe_next(row.sampled_at - request.last_output, count)
        request.last_output = row.sampled_at
        if row.statistics is not None and piece.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED:
            reason = generate_pb2.FinishReason.Name(piece.finish_reason).removeprefix("FINISH_REASON_").lower()
            self._metrics.count_end(reason, row.sampled_at - request.arrived)
            if request.first_token is not None:
                self._metrics.observe_decode(row.sampled_at - request.first_token, row.statistics.output_tokens)


def response(steps: Sequence[ScheduledRows]) -> generate_pb2.GenerateResponse:
    """Return the message of one request's output in one or several steps, without text."""
    token_ids: list[int] = []
    drafted: list[bool] = []
    logprobs: list[generate_pb2.TokenLogprobs] = []
    for row in steps:
        sampled, piece = row.sampled, row.piece
        assert sampled is not None
        assert piece is not None
        count = len(piece.token_ids)
        num_accepted = min(row.num_drafts, len(sampled.tokens) - 1)
        token_ids += piece.token_ids
        drafted += [j < num_accepted for j in range(count)]
        if sampled.logprobs is not None:
            logprobs += sampled.logprobs.messages(count)
    assert piece is not None
    return generate_pb2.GenerateResponse(
        token_ids=token_ids,
        drafted=drafted,
        logprobs=logprobs,
        finish_reason=piece.finish_reason,
        stop_token_id=piece.stop_token_id,
        statistics=steps[-1].statistics,
    )
