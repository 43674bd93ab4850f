"""Load balancing: a call goes to the next server in turn that is connected and healthy.

Each address has its own channel, so that certificates are checked against its name and errors contain it. Within
a channel gRPC's round_robin spreads calls over all hosts that a name resolves to, with gRPC's client-side health checks
(gRFC A17). Between channels this module does the same, from the states that gRPC reports.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import grpc

from draftwire.client.request import CLIENT_CHANNEL_OPTIONS
from draftwire.contract.addresses import is_literal
from draftwire.contract.client_security import ClientSecurity, open_async_channel, open_channel
from draftwire.v1.generate_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from draftwire.v1.generate_pb2_grpc import GenerationAsyncStub

S = TypeVar("S")

_SERVICE_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
_BALANCED_OPTIONS: list[tuple[str, int | str]] = [
    *CLIENT_CHANNEL_OPTIONS,
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # An idle channel would look like one to an unreachable server.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # After the loss of a host, a name's new hosts are found within seconds; gRPC's default is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
]
_READY = grpc.ChannelConnectivity.READY
_UNKNOWN = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class Server(NamedTuple, Generic[S]):
    """An address and the stub that calls it."""

    address: str
    stub: S


class Rotation:
    """Chooses among channels in turn, by their states."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, states: Sequence[grpc.ChannelConnectivity]) -> int | None:
        """Return the index of the next READY channel; None while no channel is READY but one may become READY.

        If all channels have failed, return the next of all, so that the call fails with the reason.
        """
        ready = [index for index, state in enumerate(states) if state is _READY]
        if not ready and any(state in _UNKNOWN for state in states):
            return None
        index = min(ready or range(len(states)), key=lambda index: (index - self._turn) % len(states))
        self._turn = index + 1
        return index


class Balancer:
    """The channels of a synchronous client; thread-safe. With several addresses, all channels connect at once."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        options = _options(addresses)
        self._channels = [open_channel(address, security, options) for address in addresses]
        self._servers = [
            Server(address, GenerationStub(channel)) for address, channel in zip(addresses, self._channels, strict=True)
        ]
        self._states = [grpc.ChannelConnectivity.IDLE for _ in addresses]
        self._rotation = Rotation()
        self._changed = threading.Condition()
        if len(addresses) > 1:
            for index, channel in enumerate(self._channels):
                channel.subscribe(partial(self._note, index), try_to_connect=True)

    def pick(self, timeout: float | None) -> tuple[Server[GenerationStub], float | None]:
        """Return the server of the next call and the seconds left of its timeout.

        Wait for at most `timeout` while no server is connected but one may become so.
        """
        if len(self._servers) == 1:
            return self._servers[0], timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            server = self._changed.wait_for(self._choose, timeout) or self._servers[0]
        return server, None if deadline is None else max(0.0, deadline - time.monotonic())

    def _choose(self) -> Server[GenerationStub] | None:
        index = self._rotation.choose(self._states)
        return None if index is None else self._servers[index]

    def _note(self, index: int, state: grpc.ChannelConnectivity) -> None:
        with self._changed:
            self._states[index] = state
            self._changed.notify_all()

    def close(self) -> None:
        """Close the channels; calls that still run are cancelled."""
        for index, channel in enumerate(self._channels):
            channel.close()
            self._note(index, grpc.ChannelConnectivity.SHUTDOWN)


class AsyncBalancer:
    """The channels of an asyncio client; create it in the client's event loop."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        options = _options(addresses)
        self._channels = [open_async_channel(address, security, options) for address in addresses]
        self._servers = [
            Server(address, GenerationStub(channel)) for address, channel in zip(addresses, self._channels, strict=True)
        ]
        self._rotation = Rotation()

    async def pick(self, timeout: float | None) -> tuple[Server[GenerationAsyncStub], float | None]:
        if len(self._servers) == 1:
            return self._servers[0], timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        server = self._servers[0]
        try:
            async with asyncio.timeout(timeout):
                server = await self._next()
        except TimeoutError:
            pass  # the call reports the timeout
        return server, None if deadline is None else max(0.0, deadline - time.monotonic())

    async def _next(self) -> Server[GenerationAsyncStub]:
        while True:
            states = [channel.get_state(try_to_connect=True) for channel in self._channels]
            index = self._rotation.choose(states)
            if index is not None:
                return self._servers[index]
            changes = [
                asyncio.ensure_future(channel.wait_for_state_change(state))
                for channel, state in zip(self._channels, states, strict=True)
            ]
            try:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    async def close(self) -> None:
        """Close the channels; calls that still run are cancelled."""
        for channel in self._channels:
            await channel.close()


def _options(addresses: Sequence[str]) -> list[tuple[str, int | str]]:
    """Return the options of every channel; a single IP address is one host and needs no load balancing."""
    return CLIENT_CHANNEL_OPTIONS if len(addresses) == 1 and is_literal(addresses[0]) else _BALANCED_OPTIONS
