"""Prometheus metrics over HTTP or HTTPS, on a separate port."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from draftwire.contract.addresses import parse_address
from draftwire.contract.errors import ServerError
from draftwire.server.security import ServerSecurity

logger = logging.getLogger(__name__)

# Maximum number of connections at once; each has a thread.
MAX_CONNECTIONS = 16
# Seconds that a connection may last, handshake included.
TIMEOUT_S = 10.0
# Seconds within which the thread of a closed connection must end.
CUT_TIMEOUT_S = 1.0


def with_model_name(metrics: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yield the metrics with `model_name`, the label of vLLM's metrics, after their own labels."""
    for metric in metrics:
        metric.samples = [
            sample._replace(labels={**sample.labels, "model_name": model_name}) for sample in metric.samples
        ]
        yield metric


@contextmanager
def serving_metrics(
    listen: str | None, collectors: Sequence[Collector], security: ServerSecurity
) -> Iterator[int | None]:
    """Serve /metrics with the collectors' metrics and the process metrics while the context lasts.

    Args:
        listen: HOST:PORT, port 0 for a free one; None serves nothing.
        security: With a certificate the server speaks HTTPS, with `client_ca` only to clients of these authorities.
            Tokens are not needed.

    Yields:
        The port.

    Raises:
        InvalidArgumentError: If the address is outside of loopback, without TLS and without `insecure`.
        ServerError: If the address cannot be bound, or a file of `security` cannot be read.
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
    """Wrap a WSGI application to ignore an Accept header that prometheus_client cannot parse."""

    def forgiving(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except (TypeError, ValueError):
            del environ["HTTP_ACCEPT"]
        return app(environ, start_response)

    return forgiving


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection in its own thread, handshake included, so that a slow client delays no other client. With
    too many connections the oldest is closed, so that slow connections cannot block a scrape.

    prometheus_client's `start_wsgi_server` is unsuitable: it shakes hands in the accepting thread, limits neither the
    number nor the time of connections, and reads certificates only once.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, tls_context: Callable[[], ssl.SSLContext] | None) -> None:
        self._tls_context = tls_context
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}  # start of each connection, oldest first
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]  # a port is a number

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls_context is not None:
            connection = self._tls_context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._cut(1)
            if not self._places.acquire(timeout=CUT_TIMEOUT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._begun[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can start
            self._forget(request)
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls_context is not None:
                request.do_handshake()
            super().finish_request(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """End late connections; socketserver calls this twice a second and after each connection."""
        latest = time.monotonic() - TIMEOUT_S
        with self._lock:
            num_late = sum(begun < latest for begun in self._begun.values())
        self._cut(num_late)

    def server_close(self) -> None:
        super().server_close()
        self._cut(MAX_CONNECTIONS)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.debug("a client of the metrics failed: %s: %s", client_address[0], sys.exc_info()[1])

    def _cut(self, count: int) -> None:
        """End the `count` oldest connections, even if their threads are blocked."""
        with self._lock:
            for connection in list(self._begun)[:count]:
                del self._begun[connection]
                with suppress(OSError):
                    # socket.shutdown, not SSLSocket.shutdown, which removes state that the connection's thread uses.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._begun.pop(connection, None)
