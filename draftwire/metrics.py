"""Prometheus metrics over HTTP or HTTPS, on a port of their own."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from draftwire.errors import ServerError
from draftwire.security import ServerSecurity
from draftwire.wire import parse_address

logger = logging.getLogger(__name__)

# How long a client may say nothing, in its handshake too.
TIMEOUT_S = 10.0


@contextmanager
def serving_metrics(
    listen: str | None, collectors: Sequence[Collector], security: ServerSecurity
) -> Iterator[int | None]:
    """Within it, /metrics answers with the collectors' metrics and those of the process.

    Parameters
    ----------
    listen
        HOST:PORT, port 0 for a free one; None serves nothing.
    security
        With a certificate it is HTTPS, with authorities for their clients alone; tokens are not asked for.

    Yields
    ------
    int | None
        The port.

    Raises
    ------
    InvalidArgumentError
        When it would be plain text outside of loopback without having been asked for.
    ServerError
        When the address cannot be bound, or a file of `security` cannot be read.
    """
    if listen is None:
        yield None
        return
    host, port = parse_address(listen, "metrics_listen")
    tls_context = security.tls_context(listen, "metrics_listen")
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    try:
        server = _Server(host.strip("[]"), port, tls_context)
    except OSError as error:
        raise ServerError(f"metrics_listen = {listen!r}: cannot be bound: {error.strerror or error}") from error
    server.set_app(_forgiving(make_wsgi_app(registry)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    logger.info("metrics on %s://%s:%d/metrics", "https" if tls_context else "http", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _forgiving(app: Any) -> Any:
    """The application, which by itself fails at an Accept header that it cannot read; it counts as none."""

    def forgiving(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except (TypeError, ValueError):
            del environ["HTTP_ACCEPT"]
        return app(environ, start_response)

    return forgiving


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not told."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, which shakes hands there: a client that is slow at it holds up nobody."""

    daemon_threads = True

    def __init__(self, host: str, port: int, tls_context: Callable[[], ssl.SSLContext] | None) -> None:
        self._tls_context = tls_context
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]  # a port is a number

    def finish_request(self, request: Any, client_address: Any) -> None:
        """See socketserver.BaseServer."""
        if self._tls_context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(TIMEOUT_S)
        with self._tls_context().wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """See socketserver.BaseServer."""
        logger.debug("a client of the metrics failed: %s: %s", client_address[0], sys.exc_info()[1])
