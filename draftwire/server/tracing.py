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
from collections.abc import Iterator
from contextlib import contextmanager

from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.server.security import is_plain_url_outside

logger = logging.getLogger(__name__)

# Seconds for sending the last spans, if the collector does not answer.
LAST_SPANS_S = 3.0

# If one of these is set, OpenTelemetry's variables say how traces are exported.
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_is_exporting = False


def is_exporting() -> bool:
    """Return whether this process exports traces; otherwise services create no spans."""
    return _is_exporting


@contextmanager
def exporting_traces(service: str, endpoint: str | None, *, insecure: bool = False) -> Iterator[None]:
    """Export this process' traces over OTLP/gRPC while the context lasts; send the last spans within LAST_SPANS_S.

    Args:
        service: Name of the service, unless OTEL_SERVICE_NAME gives one.
        endpoint: http://HOST:PORT, or https for TLS. None takes the endpoint of OpenTelemetry's variables, and exports
            nothing without one.
        insecure: Whether http is allowed outside of the loopback interface.

    Raises:
        InvalidArgumentError: If the endpoint is not of that form, names a user, or would be plain text outside of
            loopback without having been asked for; the last two for OpenTelemetry's variables too. The error shows no
            secret of the endpoint.
        ServerError: If the libraries are missing.
    """
    global _is_exporting
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        yield
        return
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+", endpoint):
        raise InvalidArgumentError("otlp_endpoint", _shown(endpoint), "must be http://HOST:PORT or https://HOST:PORT")
    _check_endpoint(endpoint, insecure)
    try:
        from opentelemetry import trace
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
            logger.warning("the last spans are lost: the collector did not take them within %g s", LAST_SPANS_S)


def _check_endpoint(endpoint: str | None, insecure: bool) -> None:
    given = {"otlp_endpoint": endpoint} if endpoint else {name: os.environ.get(name) for name in _ENDPOINT_VARIABLES}
    field, url = next((field, url) for field, url in given.items() if url)
    if "@" in url:  # gRPC would take the user for a part of the host name, which the exporter logs
        raise InvalidArgumentError(field, _shown(url), "must name no user; OTEL_EXPORTER_OTLP_HEADERS is for secrets")
    if not insecure and is_plain_url_outside(url):
        allowed = "plain text outside of loopback needs insecure; or give https://HOST:PORT"
        raise InvalidArgumentError(field, _shown(url), allowed)


def _shown(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    authority, *beyond = re.split(r"(?=[/?#])", rest, maxsplit=1)
    if "@" in "".join(beyond):  # may be a part of a password
        return f"{scheme}{separator}..."
    path = re.split(r"[?#]", "".join(beyond), maxsplit=1)[0]
    return scheme + separator + authority.rpartition("@")[2] + path
