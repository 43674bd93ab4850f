"""Optional OpenTelemetry traces. The extra `tracing` installs the libraries; without them this module does nothing.

A request is one trace: the client's span, the verifier's with its phases, and a drafter's for each time that the
request's sequence was open there. The trace travels as W3C `traceparent`: from client to verifier as metadata of the
call, from verifier to drafter with the opened sequence.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.server.security import is_plain_url_outside

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

logger = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
# Seconds for sending the last spans, if the collector does not answer.
LAST_SPANS_S = 3.0

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# If one of these is set, OpenTelemetry's variables say how traces are exported.
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_is_exporting = False


def is_exporting() -> bool:
    """Return whether this process exports traces; otherwise services create no spans."""
    return _is_exporting


@contextmanager
def exporting_traces(service: str, endpoint: str | None, *, insecure: bool = False) -> Iterator[None]:
    """Export this process' traces over OTLP/gRPC while the context lasts; send the last spans within LAST_SPANS_S.

    Parameters
    ----------
    service
        Name of the service, unless OTEL_SERVICE_NAME gives one.
    endpoint
        http://HOST:PORT, or https for TLS. None takes what OpenTelemetry's variables name, and exports nothing if they
        name none.
    insecure
        Whether http is allowed outside of the loopback interface.

    Raises
    ------
    InvalidArgumentError
        When the endpoint is not of that form, names a user, or would be plain text outside of loopback without having
        been asked for; the last two for OpenTelemetry's variables too. The error shows no secret of the endpoint.
    ServerError
        When the libraries are missing.
    """
    global _is_exporting
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        yield
        return
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+", endpoint):
        raise InvalidArgumentError("otlp_endpoint", _shown(endpoint), "must be http://HOST:PORT or https://HOST:PORT")
    _check_endpoint(endpoint, insecure)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ServerError(f"traces need the extra `tracing`: pip install 'draftwire[tracing]' ({error})") from error
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
    _is_exporting = True
    try:
        yield
    finally:
        _is_exporting = False
        # OpenTelemetry's own limit is 30 s, more than services have to end.
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_SPANS_S)
        if ending.is_alive():
            logger.warning("traces: the last spans are given up: not taken in %g s", LAST_SPANS_S)


def _check_endpoint(endpoint: str | None, insecure: bool) -> None:
    given = {"otlp_endpoint": endpoint} if endpoint else {name: os.environ.get(name) for name in _ENDPOINT_VARIABLES}
    field, url = next((field, url) for field, url in given.items() if url)
    if "@" in url:  # gRPC would take the user for a part of the host name, which the exporter logs
        raise InvalidArgumentError(field, _shown(url), "must name no user; OTEL_EXPORTER_OTLP_HEADERS is for secrets")
    if not insecure and is_plain_url_outside(url):
        raise InvalidArgumentError(
            field, _shown(url), "plain text outside of loopback must be asked for with insecure; or give https://HOST:PORT"
        )


def _shown(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    authority, *beyond = re.split(r"(?=[/?#])", rest, maxsplit=1)
    if "@" in "".join(beyond):  # may be a part of a password
        return f"{scheme}{separator}..."
    path = re.split(r"[?#]", "".join(beyond), maxsplit=1)[0]
    return scheme + separator + authority.rpartition("@")[2] + path


def check_traceparent(value: str, field: str) -> None:
    """Raise ------ InvalidArgumentError Names `field` unless the value is empty or of W3C's form.
    """
    if value and not _FORM.fullmatch(value):
        raise InvalidArgumentError(field, value, "must be a W3C traceparent, as 00-<32 hex>-<16 hex>-01, or empty")


def start_span(
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    *,
    traceparent: str | None = None,
    start_ns: int | None = None,
) -> Span:
    """Start a span and return it. Needs the OpenTelemetry API.

    Parameters
    ----------
    kind
        SERVER, CLIENT or INTERNAL.
    attributes
        Attributes, whose names get the prefix `draftwire.`.
    traceparent
        The parent; empty or malformed begins a trace. None takes the current span of this thread or task.
    start_ns
        Unix time, ns; None is now.
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
