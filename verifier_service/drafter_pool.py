"""The drafters that a verifier uses: addresses and DNS names, looked up again and again as drafters come and go."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from draftwire.v1 import generate_pb2
from draftwire.wire import parse_address
from verifier_service.drafter_link import DrafterLink

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 2.0
CONNECTED_STATES = {
    generate_pb2.DRAFTER_STATE_READY,
    generate_pb2.DRAFTER_STATE_DRAINING,
    generate_pb2.DRAFTER_STATE_SLOW,
    generate_pb2.DRAFTER_STATE_PROBING,
}


class DrafterPool:
    """Keeps a link to every drafter behind the given names.

    A name with several addresses, as a headless service or a scaled compose service has, stands for a drafter at each.
    A link whose address is no longer named goes once its stream has ended: a name server that fails takes no drafter
    away. The links run on an event loop and a thread of their own, so that drafts do not wait behind clients.
    """

    def __init__(self, names: Sequence[str], make_link: Callable[[str, str], DrafterLink]) -> None:
        """`names` are HOST:PORT; `make_link` gives the link to an address of a host."""
        self._names = names
        self._make_link = make_link
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, DrafterLink] = {}
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="drafters", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts to look for drafters."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Closes all links; harmless when there are none."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    @property
    def statuses(self) -> list[generate_pb2.DrafterStatus]:
        """State of each link, of unresolvable names too, and of every name before the first look; from any thread."""
        links = list(self._links.values())
        if links:
            return [link.status for link in links]
        state = generate_pb2.DRAFTER_STATE_CONNECTING
        return [generate_pb2.DrafterStatus(address=name, state=state) for name in self._names]

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._started.set()
        while not self._stopping.is_set():
            self._update({address: host for name in self._names for address, host in await _resolve(name)})
            try:
                await asyncio.wait_for(self._stopping.wait(), RESOLVE_INTERVAL_S)
            except TimeoutError:
                continue
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _update(self, addresses: dict[str, str]) -> None:
        """Opens links to new addresses and drops those of addresses that are neither named nor connected."""
        for address in [*self._links]:
            is_connected = self._links[address].status.state in CONNECTED_STATES
            if address not in addresses and not is_connected:
                logger.info("drafter %s: no longer named, dropped", address)
                del self._links[address]
                self._tasks.pop(address).cancel()
        for address, host in addresses.items():
            if address not in self._links:
                link = self._make_link(address, host)
                self._links[address] = link
                self._tasks[address] = asyncio.create_task(link.run())


async def _resolve(name: str) -> list[tuple[str, str]]:
    """(HOST:PORT, host as it was named) of every address of a name; the name itself while it cannot be resolved."""
    host, port = parse_address(name, "drafters")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return [(name, host)]
    # A drafter that listens on both families is one drafter.
    families = [family for family in (socket.AF_INET, socket.AF_INET6) if any(entry[0] == family for entry in found)]
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found if entry[0] == families[0])
    return [(f"[{one}]:{port}" if ":" in one else f"{one}:{port}", host.strip("[]")) for one in hosts]
