"""Output of steps on its way to the clients, which is written when there is time."""

from __future__ import annotations

from collections.abc import Callable

from draftwire.errors import DraftwireError
from draftwire.v1 import generate_pb2
from verifier_service.emission import Emission, response
from verifier_service.request import Request
from verifier_service.request_metrics import RequestMetrics

# What a request's sink gets.
Item = generate_pb2.GenerateResponse | DraftwireError


class OutputQueue:
    """What requests have been given and not been told yet. Used by the engine's thread alone."""

    def __init__(self, deliver: Callable[[list[tuple[Request, Item]]], None], metrics: RequestMetrics) -> None:
        """`deliver` hands messages and errors on, and must not block."""
        self._deliver = deliver
        self._metrics = metrics
        self._emissions: list[Emission] = []
        self._errors: list[tuple[Request, DraftwireError]] = []

    def add(self, emission: Emission) -> None:
        """Adds a step's output of one request."""
        self._emissions.append(emission)

    def add_error(self, request: Request, error: DraftwireError) -> None:
        """Adds the error that ends a request."""
        self._errors.append((request, error))

    @property
    def is_waiting(self) -> bool:
        """Whether there is anything to be handed out."""
        return bool(self._emissions) or self.has_errors

    @property
    def has_errors(self) -> bool:
        """Whether there is an error among it."""
        return bool(self._errors)

    def hand_out(self) -> None:
        """Turn all of it into messages and deliver them."""
        emissions, self._emissions = self._emissions, []
        messages: list[list[Emission]] = []
        latest: dict[Request, list[Emission]] = {}
        for emission in emissions:
            request = emission.work.request
            self._observe(emission)
            # Statistics are as of the last token of their message.
            if request in latest and latest[request][-1].statistics is None:
                latest[request].append(emission)
            else:
                latest[request] = [emission]
                messages.append(latest[request])
        items: list[tuple[Request, Item]] = [(steps[0].work.request, response(steps)) for steps in messages]
        items += self._errors
        self._errors = []
        if items:
            self._deliver(items)

    def _observe(self, emission: Emission) -> None:
        request, count = emission.work.request, len(emission.piece.token_ids)
        if request.last_output is None:
            self._metrics.observe_first(emission.drawn_at - request.arrived, len(request.prompt), count)
        else:
            self._metrics.observe_next(emission.drawn_at - request.last_output, count)
        request.last_output = emission.drawn_at
        finish_reason = emission.piece.finish_reason
        if emission.statistics is not None and finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED:
            reason = generate_pb2.FinishReason.Name(finish_reason)
            reason = reason.removeprefix("FINISH_REASON_").lower()
            self._metrics.count_end(reason, emission.drawn_at - request.arrived)
            if request.first_token is not None:
                decode_s = emission.drawn_at - request.first_token
                self._metrics.observe_decode(decode_s, emission.statistics.output_tokens)
