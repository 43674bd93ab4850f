"""What is told of a request besides its output: one log line at its end."""

from __future__ import annotations

import logging

from draftwire.errors import DraftwireError, InvalidArgumentError, QueueFullError, UnavailableError
from draftwire.logs import fields
from draftwire.v1 import generate_pb2

logger = logging.getLogger(__name__)


class RequestWatch:
    """Follows one request. One of its methods is called, once, when the request has ended."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def refused(self, error: InvalidArgumentError | UnavailableError) -> None:
        """It was not taken. Of a field that is wrong the value is not told: it may be the prompt."""
        cause = {"field": error.field} if isinstance(error, InvalidArgumentError) else {"error": str(error)}
        logger.info("request refused", extra=fields(request_id=self._request_id, **cause))

    def failed(self, error: DraftwireError) -> None:
        """It has ended with an error."""
        level = logging.INFO if isinstance(error, QueueFullError) else logging.WARNING
        logger.log(level, "request failed", extra=fields(request_id=self._request_id, error=str(error)))

    def cancelled(self, output_tokens: int) -> None:
        """Its client has gone."""
        told = fields(request_id=self._request_id, reason="cancelled", output_tokens=output_tokens)
        logger.info("request finished", extra=told)

    def finished(self, last: generate_pb2.GenerateResponse) -> None:
        """It has ended with that message."""
        counts = last.statistics
        length = counts.verify_tokens / counts.verify_steps if counts.verify_steps else None
        told = fields(
            request_id=self._request_id,
            reason=generate_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower(),
            prompt_tokens=counts.prompt_tokens,
            output_tokens=counts.output_tokens,
            queue_s=round(counts.queue_time_s, 6),
            ttft_s=round(counts.time_to_first_token_s, 6),
            total_s=round(counts.total_time_s, 6),
            acceptance_length=None if length is None else round(length, 3),
        )
        logger.info("request finished", extra=told)
