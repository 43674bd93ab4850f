"""Log lines and spans of one stream's sequences, with the verifier's request ids."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafter_service.engine.answer import Answer
from draftwire.contract.spans import end_span, start_span
from draftwire.server.logs import fields
from draftwire.server.tracing import is_exporting
from draftwire.v1 import draft_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

# Maximum number of request ids in one log line.
MAX_NAMED = 32


@dataclass
class _Watched:
    """An open sequence, with counters for debug lines and spans."""

    sequence_id: int
    request_id: str
    span: Span | None = None
    opened: float = field(default_factory=time.monotonic)
    steps: int = 0
    drafts: int = 0

    def described(self) -> dict[str, object]:
        return {"request_id": self.request_id, "sequence_id": self.sequence_id}


class SequenceWatch:
    """Follows a stream's sequences, on the engine's thread. Drafts are counted only for debug lines and spans."""

    def __init__(self, verifier: str) -> None:
        """`verifier` is the verifier's name in the log."""
        self._verifier = verifier
        self._open: dict[int, _Watched] = {}
        self._counts = logger.isEnabledFor(logging.DEBUG) or is_exporting()

    def take_step(self, step: pb.DraftStep | pb.Commit) -> None:
        """Record the sequences that a checked step closes and opens."""
        for sequence_id in step.closed_ids:
            self._end(sequence_id, "closed")
        if isinstance(step, pb.Commit):
            return
        nothing = [""] * len(step.opened.ids)
        request_ids = step.opened.request_ids or nothing
        traceparents = step.opened.traceparents or nothing
        for sequence_id, request_id, traceparent in zip(step.opened.ids, request_ids, traceparents, strict=True):
            watched = self._open[sequence_id] = _Watched(sequence_id, request_id)
            if traceparent and is_exporting():
                watched.span = start_span("draft", "SERVER", watched.described(), traceparent=traceparent)
            logger.debug("sequence opened", extra=fields(verifier=self._verifier, **watched.described()))

    def take_answer(self, answer: Answer) -> None:
        """Record an answer's drafts and refused sequences."""
        drafts = answer.drafts
        if any(status != pb.SEQUENCE_STATUS_OK for status in drafts.statuses):
            for sequence_id, status in zip(drafts.sequence_ids, drafts.statuses, strict=True):
                if status != pb.SEQUENCE_STATUS_OK:
                    self._refuse(sequence_id, status)
        if self._counts:
            for sequence_id, num_drafts in zip(drafts.sequence_ids, drafts.num_drafts, strict=True):
                watched = self._open.get(sequence_id)
                if watched is not None:
                    watched.steps += 1
                    watched.drafts += num_drafts

    def end(self, error: BaseException | None) -> None:
        """Record the end of the stream, with or without an error."""
        if error is not None and self._open:
            request_ids = [watched.request_id for watched in self._open.values()]
            logged = fields(
                verifier=self._verifier,
                error=str(error) or type(error).__name__,
                sequences=len(request_ids),
                request_ids=request_ids[:MAX_NAMED],
            )
            logger.warning("stream ended with open sequences", extra=logged)
        for sequence_id in list(self._open):
            self._end(sequence_id, "stream ended")

    def _refuse(self, sequence_id: int, status: pb.SequenceStatus) -> None:
        watched = self._open.get(sequence_id) or _Watched(sequence_id, "")
        name = pb.SequenceStatus.Name(status).removeprefix("SEQUENCE_STATUS_").lower()
        logged = fields(verifier=self._verifier, **watched.described(), status=name)
        logger.warning("sequence not taken", extra=logged)
        self._end(sequence_id, name)

    def _end(self, sequence_id: int, reason: str) -> None:
        watched = self._open.pop(sequence_id, None)
        if watched is None or not self._counts:
            return
        counts = {"reason": reason, "steps": watched.steps, "drafts": watched.drafts}
        seconds = round(time.monotonic() - watched.opened, 6)
        logged = fields(verifier=self._verifier, **watched.described(), **counts, seconds=seconds)
        logger.debug("sequence ended", extra=logged)
        if watched.span is not None:
            end_span(watched.span, {"verifier": self._verifier, **counts})
