"""Prometheus metrics over HTTP, on a port of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from draftwire.errors import ServerError
from draftwire.wire import parse_address

logger = logging.getLogger(__name__)


@contextmanager
def serving_metrics(listen: str | None, collectors: Sequence[Collector]) -> Iterator[int | None]:
    """Within it, http://HOST:PORT/metrics answers with the collectors' metrics and those of the process.

    Parameters
    ----------
    listen
        HOST:PORT, port 0 for a free one; None serves nothing.

    Yields
    ------
    int | None
        The port.

    Raises
    ------
    ServerError
        When the address cannot be bound.
    """
    if listen is None:
        yield None
        return
    host, port = parse_address(listen, "metrics_listen")
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ServerError(f"metrics_listen = {listen!r}: cannot be bound: {error.strerror or error}") from error
    logger.info("metrics on http://%s:%d/metrics", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
