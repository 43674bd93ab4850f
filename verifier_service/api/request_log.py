"""Observability of a request: a log line at its end, and spans if traces are exported."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from draftwire.contract.errors import DraftwireError, InvalidArgumentError, QueueFullError, UnavailableError
from draftwire.contract.spans import TRACEPARENT, end_span, start_span, traceparent_of
from draftwire.server.logs import fields
from draftwire.server.tracing import is_exporting
from draftwire.v1 import generate_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

# Keys and values of a call's metadata.
Metadata = Iterable[tuple[str, str | bytes]]

PHASES = ("queue", "prefill", "decode")


class RequestWatch:
    """Follows one request. When the request has ended, exactly one of the methods is called."""

    def __init__(self, request_id: str, metadata: Metadata) -> None:
        """`metadata` of the call has the client's traceparent if there is a trace."""
        self._request_id = request_id
        self._span: Span | None = None
        if is_exporting():
            parent = next((str(value) for key, value in metadata if key == TRACEPARENT), "")
            self._span = start_span("Generate", "SERVER", {"request_id": request_id}, traceparent=parent)

    @property
    def traceparent(self) -> str:
        """Return the traceparent of the request's span, for drafters; empty without a trace."""
        return "" if self._span is None else traceparent_of(self._span)

    def refused(self, error: InvalidArgumentError | UnavailableError) -> None:
        """Log a refused request, without the value of the wrong field, which may be the prompt."""
        cause = {"field": error.field} if isinstance(error, InvalidArgumentError) else {"error": str(error)}
        logger.info("request refused", extra=fields(request_id=self._request_id, **cause))
        self._end(cause, "refused")

    def failed(self, error: DraftwireError) -> None:
        """Log a request that ended with an error."""
        level = logging.INFO if isinstance(error, QueueFullError) else logging.WARNING
        logger.log(level, "request failed", extra=fields(request_id=self._request_id, error=str(error)))
        self._end({"error": str(error)}, "failed")

    def cancelled(self, output_tokens: int) -> None:
        """Log a request whose client has gone."""
        logged: dict[str, Any] = {"reason": "cancelled", "output_tokens": output_tokens}
        logger.info("request finished", extra=fields(request_id=self._request_id, **logged))
        self._end(logged)

    def finished(self, last: Sequence[generate_pb2.GenerateResponse]) -> None:
        """Log each output by its last message. The span describes the output that ended last."""
        logged: dict[str, Any] = {}
        for message in last:
            logged = _logged_of(message)
            index = {"index": message.index} if len(last) > 1 else {}
            logger.info("request finished", extra=fields(request_id=self._request_id, **index, **logged))
        if self._span is not None:
            self._add_phases(traceparent_of(self._span), last[-1].statistics)
        self._end({**logged, "outputs": len(last)} if len(last) > 1 else logged)

    def _add_phases(self, parent: str, counts: generate_pb2.RequestStatistics) -> None:
        """Add the spans of the request's phases, from its statistics; the last ends now."""
        arrived = time.time_ns() - int(counts.total_time_s * 1e9)
        marks = (0.0, counts.queue_time_s, counts.time_to_first_token_s, counts.total_time_s)
        details: dict[str, dict[str, Any]] = {
            "queue": {},
            "prefill": {"prompt_tokens": counts.prompt_tokens, "prefix_hit_tokens": counts.prefix_hit_tokens},
            "decode": {
                "verify_steps": counts.verify_steps,
                "drafted": sum(counts.drafted),
                "accepted": sum(counts.accepted),
                "preemptions": counts.preemptions,
            },
        }
        for name, (begin_s, end_s) in zip(PHASES, pairwise(marks), strict=True):
            span = start_span(
                name, "INTERNAL", details[name], traceparent=parent, start_ns=arrived + int(begin_s * 1e9)
            )
            end_span(span, {}, end_ns=arrived + int(end_s * 1e9))

    def _end(self, logged: dict[str, Any], failure: str = "") -> None:
        if self._span is not None:
            end_span(self._span, logged, failure=failure)


def _logged_of(last: generate_pb2.GenerateResponse) -> dict[str, Any]:
    """Return the logged fields of an output with this last message."""
    counts = last.statistics
    length = counts.verify_tokens / counts.verify_steps if counts.verify_steps else None
    return {
        "reason": generate_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "queue_s": round(counts.queue_time_s, 6),
        "ttft_s": round(counts.time_to_first_token_s, 6),
        "total_s": round(counts.total_time_s, 6),
        "acceptance_length": None if length is None else round(length, 3),
    }
