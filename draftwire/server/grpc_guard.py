"""A server of grpc.aio that survives every method name.

grpc.aio decodes the name of an unregistered method in the loop that accepts calls. A name that is not UTF-8 raises an
exception there and closes the port for good, so one HTTP/2 frame of any peer stops the server. This server registers
all methods, and refuses calls of other methods before their name is decoded.

grpcio has no public way: interceptors and generic handlers run after that loop, which also accepts calls of
unregistered methods if there are no generic handlers. So pyproject.toml pins the version of grpcio, and
tests/contract/test_grpc_guard.py fails when the private class changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server


class _Accepting(cygrpc.AioServer):
    """Answers UNIMPLEMENTED to calls of methods that are not registered."""

    async def _request_call(self) -> Any:
        state = await super()._request_call()
        context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
        refusal = asyncio.get_running_loop().create_task(_refuse(context))
        _refusals.add(refusal)
        refusal.add_done_callback(_refusals.discard)
        raise cygrpc._RequestCallError  # the loop asks for the next call


_refusals: set[asyncio.Task[None]] = set()  # keeps a reference: the event loop holds none


async def _refuse(context: Any) -> None:
    with contextlib.suppress(Exception):  # raised after the status was sent, and when the peer has gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class GuardedServer(_server.Server):
    """Create a server as `grpc.aio.server` does, for the running event loop. Every service must register its
    methods."""

    def __init__(
        self, options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> None:
        super().__init__(None, (), tuple(interceptors), (), None, None)
        arguments = _server._augment_channel_arguments(options, None)
        self._server = _Accepting(self._loop, None, (), tuple(interceptors), arguments, None)
