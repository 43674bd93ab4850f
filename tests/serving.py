"""A verifier's service in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.v1.generate_pb2_grpc import add_GenerationServicer_to_server
from verifier_service.api.requests import RequestHandler
from verifier_service.api.service import GenerationServicer


@asynccontextmanager
async def serving(handler: RequestHandler, *others: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """Serve requests with a handler; yield the address. `others` add further services to the server."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_GenerationServicer_to_server(GenerationServicer(handler), server)
    for add in others:
        add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await handler.start()
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await handler.stop()
