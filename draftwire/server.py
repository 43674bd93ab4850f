"""Bootstrap that both services share: address, health, reflection, orderly stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwire.errors import ServerError
from draftwire.security import ServerSecurity, TokenInterceptor
from draftwire.wire import CHANNEL_OPTIONS, parse_address

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
# An engine's thread that wakes up must not wait for the event loop as long as Python's default of 5 ms.
SWITCH_INTERVAL_S = 0.0002


async def serve(
    listen: str,
    service_name: str,
    register: Callable[[grpc.aio.Server], None],
    on_stop: Callable[[], Awaitable[None]],
    security: ServerSecurity,
    grace_s: float = STOP_GRACE_S,
) -> None:
    """Serves until SIGTERM or SIGINT, then gives running calls some time to end.

    Parameters
    ----------
    listen
        HOST:PORT; port 0 takes a free one. The line `listening on HOST:PORT` on standard output names it.
    service_name
        Full name of the service, for health and reflection.
    register
        Adds the service to the server.
    on_stop
        Called once no call is left.
    security
        Who is let in; tokens are asked for by the service, not by health and reflection.
    grace_s
        Seconds that running calls are given.

    Raises
    ------
    InvalidArgumentError
        When it would be plain text outside of loopback without having been asked for.
    ServerError
        When the address cannot be bound, or a certificate or token file cannot be read.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    credentials = security.credentials(listen)
    interceptors = [TokenInterceptor(security.token_file, service_name)] if security.token_file else []
    server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)], interceptors=interceptors)
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names: Sequence[str] = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    host, _ = parse_address(listen, "listen")
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ServerError(
            f"listen = {listen!r}: cannot be bound: the port is in use or the host is not of this machine"
        ) from error
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    for name in ("", service_name):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    print(f"listening on {host}:{port}", flush=True)
    await stop.wait()
    logger.info("stopping")
    await health_servicer.enter_graceful_shutdown()
    await server.stop(grace_s)
    await on_stop()
