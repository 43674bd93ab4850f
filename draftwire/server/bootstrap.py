"""Start and stop of both services: addresses, health, reflection, signals."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwire.contract.addresses import parse_address
from draftwire.contract.errors import ServerError
from draftwire.server.call_admission import AdmissionInterceptor
from draftwire.server.grpc_guard import GuardedServer
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.server.security import ServerSecurity, TokenInterceptor
from draftwire.server.stop_signals import STOP_SIGNALS, end_at_signals

logger = logging.getLogger(__name__)

# Seconds in which a call may send its end or its error when the server stops.
STOP_GRACE_S = 1.0
# Connections without an HTTP/2 handshake are closed after this time; gRPC's default is two minutes.
CONNECTION_LIMITS = [("grpc.server_handshake_timeout_ms", 10_000)]
# Limits of the port for probes.
_PROBE_LIMITS = ReadingLimits(4096, max_readers=8, max_readers_of_peer=4, max_unread=64, max_unread_of_peer=32)
# Seconds after which a waking engine thread gets the interpreter from the event loop; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0002


async def serve(
    listen: str,
    service_names: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
    security: ServerSecurity,
    reader: MessageReader,
    *,
    stop: asyncio.Event,
    drain: Callable[[], Awaitable[None]],
    on_stop: Callable[[], Awaitable[None]],
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    health_listen: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends the process at once.

    Args:
        listen: HOST:PORT; port 0 takes a free one. The line `listening on HOST:PORT` on standard output names it.
        service_names: Full names of the services that clients or verifiers call, for health and reflection.
        register: Adds these services to the server.
        security: TLS and tokens. Health and reflection need no token.
        reader: Reads the messages of these services' unary calls.
        stop: Set by the first signal; the caller may set it too.
        drain: Called after the stop, when health is NOT_SERVING and clients may still call. Refuses new requests, and
            returns after all requests have ended or the drain timeout.
        on_stop: Called after the last call has ended.
        interceptors: Further interceptors.
        health_listen: HOST:PORT of a second health service in plain text, for probes without a certificate, or None.

    Raises:
        InvalidArgumentError: If the address is outside of loopback, without TLS and without `insecure`.
        ServerError: If the address cannot be bound, or a certificate or token file cannot be read.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    credentials = security.credentials(listen)
    server: Any = GuardedServer(_options(reader.limits), _interceptors(security, service_names, reader, interceptors))
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host, _ = parse_address(listen, "listen")
    port = _bind(server, listen, "listen", credentials)
    servers = [server]
    if health_listen is not None:
        servers.append(_health_server(health_listen, health_servicer))
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    for each in servers:
        await each.start()
    for name in ("", *service_names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    # One write for the text and its newline, so that no log line of another thread comes between them.
    print(f"listening on {host}:{port}\n", end="", flush=True)
    await stop.wait()
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
    end_at_signals()  # from now on a signal ends the process at once
    logger.info("draining")
    await health_servicer.enter_graceful_shutdown()
    await drain()
    logger.info("stopping")
    await asyncio.gather(*(each.stop(STOP_GRACE_S) for each in servers))
    await on_stop()


def _options(limits: ReadingLimits) -> list[tuple[str, Any]]:
    return [*limits.options(), ("grpc.so_reuseport", 0), *CONNECTION_LIMITS]


def _interceptors(
    security: ServerSecurity,
    service_names: Sequence[str],
    reader: MessageReader,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> list[grpc.aio.ServerInterceptor]:
    others = MessageReader(limits_of_others(reader.limits), by_host=True)
    tokens = [TokenInterceptor(security.token_file, service_names)] if security.token_file else []
    return [*tokens, AdmissionInterceptor(service_names, reader, others), *interceptors]


def _bind(server: Any, listen: str, field: str, credentials: grpc.ServerCredentials | None) -> int:
    """Open a port of the server and return its number; an error about the address names `field`."""
    try:
        return int(server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen))
    except RuntimeError as error:
        raise ServerError(
            f"{field} = {listen!r}: cannot be bound: the port is in use or the host is not of this machine"
        ) from error


def _health_server(listen: str, servicer: health.aio.HealthServicer) -> GuardedServer:
    """Return a server with only the health service, in plain text, on the service's event loop."""
    reader = MessageReader(_PROBE_LIMITS, by_host=True)
    server = GuardedServer(_options(_PROBE_LIMITS), [AdmissionInterceptor([health.SERVICE_NAME], reader, reader)])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = _bind(server, listen, "health_listen", None)
    logger.info("health service in plain text on port %d", port)
    return server


def limits_of_others(own: ReadingLimits) -> ReadingLimits:
    """Return the reading limits of health and reflection, whose calls need no token."""
    max_readers = max(1, own.max_readers // 2)
    return ReadingLimits(own.max_message_bytes, max_readers, max(1, max_readers // 4), 256, 64, own.window_bytes)
