"""Trace spans and their propagation. All but `check_traceparent` need OpenTelemetry's API (`HAS_API`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwire.contract.errors import InvalidArgumentError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HAS_API = False
else:
    HAS_API = True
    _propagator = TraceContextTextMapPropagator()

TRACEPARENT = "traceparent"
_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def check_traceparent(value: str, field: str) -> None:
    """Check a traceparent of a message.

    Raises:
        InvalidArgumentError: If the value is neither empty nor of W3C's form.
    """
    if value and not _FORM.fullmatch(value):
        raise InvalidArgumentError(field, value, "must be a W3C traceparent, as 00-<32 hex>-<16 hex>-01, or empty")


def start_span(
    name: str, kind: str, attributes: Mapping[str, Any], *, traceparent: str | None = None, start_ns: int | None = None
) -> Span:
    """Start a span and return it.

    Args:
        kind: SERVER, CLIENT or INTERNAL.
        attributes: Attributes, whose names get the prefix `draftwire.`.
        traceparent: The parent; empty or malformed begins a trace. None takes the current span of this thread or task.
        start_ns: Unix time, ns; None is now.
    """
    context = None if traceparent is None else _propagator.extract({TRACEPARENT: traceparent}, Context())
    tracer = trace.get_tracer("draftwire")
    span = tracer.start_span(name, context, trace.SpanKind[kind], start_time=start_ns)
    _set(span, attributes)
    return span


def end_span(span: Span, attributes: Mapping[str, Any], *, failure: str = "", end_ns: int | None = None) -> None:
    """End a span, as failed if there was a `failure`."""
    _set(span, attributes)
    if failure:
        span.set_status(trace.StatusCode.ERROR, failure)
    span.end(end_ns)


def traceparent_of(span: Span) -> str:
    """Return the traceparent that names a span as the parent; empty if there is no trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(f"draftwire.{name}", value)
