"""The drafters of a verifier: addresses, and DNS names that are resolved periodically."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from draftwire.contract.addresses import parse_address
from draftwire.v1 import generate_pb2
from verifier_service.drafters.connection import DrafterLink
from verifier_service.drafters.threads import in_thread

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 2.0


class DrafterPool:
    """Keeps a link to every drafter behind the given names.

    A name with several addresses, such as a headless service or a scaled compose service, stands for one drafter per
    address. A link whose address is no longer named is closed unless `DrafterLink.is_needed`; a failing name server
    closes no link. A name without addresses gets no link. The links run on a separate event loop and thread, so that
    drafts do not wait behind clients.
    """

    def __init__(self, names: Sequence[str], make_link: Callable[[str, str], DrafterLink]) -> None:
        """`names` are HOST:PORT; `make_link` creates the link to an address of a host."""
        # For each name, the host of each of its addresses; empty if the name is not or cannot be resolved.
        self._found: dict[str, dict[str, str]] = {name: {} for name in names}
        self._make_link = make_link
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, DrafterLink] = {}
        self._name_of: dict[str, str] = {}  # by address: the name that last resolved to it
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="drafters", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread that resolves names and keeps links."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Close all links, if there are any."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    @property
    def statuses(self) -> list[generate_pb2.DrafterStatus]:
        """Return the status of each link, and of each name without addresses; thread-safe."""
        state, detail = generate_pb2.DRAFTER_STATE_CONNECTING, "the name has no address"
        unresolved = [
            generate_pb2.DrafterStatus(address=name, state=state, detail=detail)
            for name, hosts in self._found.items()
            if not hosts
        ]
        return [*(link.status for link in list(self._links.values())), *unresolved]

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._started.set()
        look_ups = [asyncio.create_task(self._follow(name)) for name in self._found]
        await self._stopping.wait()
        tasks = [*look_ups, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str) -> None:
        """Resolve a name periodically, independently of other names."""
        while True:
            try:
                self._found[name] = await _resolve(name)
                self._update()
            except Exception:
                logger.exception("drafters %s: look-up failed", name)
            await asyncio.sleep(RESOLVE_INTERVAL_S)

    def _update(self) -> None:
        """Open links to new addresses, and drop links that are neither named nor needed."""
        addresses = {address: host for hosts in self._found.values() for address, host in hosts.items()}
        self._name_of.update({address: name for name, hosts in self._found.items() for address in hosts})
        for address, host in addresses.items():
            if address not in self._links:
                link = self._make_link(address, host)
                self._links[address] = link
                self._tasks[address] = asyncio.create_task(link.run())
        for address, link in list(self._links.items()):
            if address not in addresses and self._found[self._name_of[address]] and not link.is_needed:
                logger.info("drafter %s: no longer named; link closed", address)
                del self._links[address], self._name_of[address]
                self._tasks.pop(address).cancel()


async def _resolve(name: str) -> dict[str, str]:
    """Return the host of each HOST:PORT address of a name; empty if the name cannot be resolved."""
    host, port = parse_address(name, "drafters")
    look_up = partial(socket.getaddrinfo, host.strip("[]"), port, type=socket.SOCK_STREAM)
    try:
        entries = await in_thread("look-up", look_up)  # a name server may be slow
    except OSError:
        return {}
    # A drafter that listens on IPv4 and IPv6 is one drafter.
    families = [family for family in (socket.AF_INET, socket.AF_INET6) if any(one[0] == family for one in entries)]
    hosts = dict.fromkeys(str(one[4][0]) for one in entries if one[0] == families[0])
    return {(f"[{one}]:{port}" if ":" in one else f"{one}:{port}"): host.strip("[]") for one in hosts}
