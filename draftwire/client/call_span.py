"""The client's part of a trace."""

from __future__ import annotations

from draftwire.contract.spans import HAS_API, TRACEPARENT, end_span, start_span, traceparent_of


class CallSpan:
    """The span of one request, a child of the caller's current span; does nothing without OpenTelemetry's API.

    The span is exported if the application has set up OpenTelemetry.
    """

    def __init__(self, address: str) -> None:
        self._span = start_span("draftwire.generate", "CLIENT", {"server": address}) if HAS_API else None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the call's metadata, which make the server's spans children of this span."""
        traceparent = "" if self._span is None else traceparent_of(self._span)
        return ((TRACEPARENT, traceparent),) if traceparent else ()

    def end(self, request_id: str, failure: str = "") -> None:
        """End the span, when the request ends or is dropped; later calls have no effect."""
        if self._span is not None:
            end_span(self._span, {"request_id": request_id or None}, failure=failure)
            self._span = None
