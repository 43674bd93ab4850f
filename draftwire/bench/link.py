"""A link to a network namespace with a delay, a rate and a loss of its own.

Two TUN devices, one here and one in the namespace, and a process that passes packets between them. It does so on every
Linux; the kernel's own queueing discipline for that (netem) is often left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Self

_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
_MAX_PACKET = 65536
# Packets taken from a device at once, so that the other direction and what is due have their turn.
_BATCH = 64


@dataclass(frozen=True)
class LinkQuality:
    """What happens to packets, each way."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None  # None: no limit
    loss: float = 0.0  # share of the packets


class Link:
    """Exists from `__enter__` to `__exit__`.

    Attributes
    ----------
    address
        Of the namespace's end, an IPv4 address.
    program
        Command that runs `draftwire` in the namespace.
    """

    def __init__(self, mtu: int = 1500) -> None:
        """`mtu` is the size of the largest packet, in bytes.

        Raises
        ------
        OSError
            Where there are no TUN devices, no `ip` command, or no right to make devices and namespaces.
        """
        # A /30 of the range kept for tests of networks (RFC 2544), another one for each process.
        net = 4 * (os.getpid() % (1 << 14))
        first, self.address = (f"198.{18 + (net >> 16)}.{net >> 8 & 255}.{(net & 255) + host}" for host in (1, 2))
        name = f"draftwire-{os.getpid()}"
        self.program = ("ip", "netns", "exec", name, sys.executable, "-m", "draftwire")
        here, there = f"dw{os.getpid() % 10**7}", f"dx{os.getpid() % 10**7}"
        with ExitStack() as close:
            _run("ip", "netns", "add", name)
            close.callback(_run, "ip", "netns", "delete", name)
            ends = [_open_device(one, close) for one in (here, there)]
            _run("ip", "address", "add", f"{first}/30", "dev", here)
            _run("ip", "link", "set", here, "up", "mtu", str(mtu))
            _run("ip", "link", "set", there, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{self.address}/30", "dev", there)
            _run("ip", "-n", name, "link", "set", there, "up", "mtu", str(mtu))
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # A process of its own: the threads of this one would hold packets up.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftwire.bench.link", *map(str, ends)],
                pass_fds=ends,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            close.callback(self._end)
            self._close = close.pop_all()

    def set(self, quality: LinkQuality) -> int:
        """Has packets that are sent from now on treated so; the number of those that have been lost so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(quality)) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()


class _Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._queue: deque[tuple[float, bytes]] = deque()  # (monotonic time at which it arrives, packet)
        self._free = 0.0  # when all packets before are through

    @property
    def due(self) -> float | None:
        """When the next packet arrives."""
        return self._queue[0][0] if self._queue else None

    def take(self, quality: LinkQuality) -> int:
        """Takes packets from the source; how many are lost."""
        lost = 0
        for _ in range(_BATCH):
            try:
                packet = os.read(self._source, _MAX_PACKET)
            except BlockingIOError:
                break
            if random.random() < quality.loss:
                lost += 1
                continue
            seconds = 0.0 if quality.bytes_per_s is None else len(packet) / quality.bytes_per_s
            self._free = max(self._free, time.monotonic()) + seconds
            self._queue.append((self._free + quality.delay_s, packet))
        return lost

    def deliver(self) -> None:
        """Gives the sink what has arrived."""
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            os.write(self._sink, self._queue.popleft()[1])


def _pass_packets(ends: list[int]) -> None:
    """Until there is no more input: a line with a `LinkQuality` at a time, answered with the number of lost packets."""
    for fd in ends:
        os.set_blocking(fd, False)
    directions = {ends[0]: _Direction(*ends), ends[1]: _Direction(*reversed(ends))}
    quality, num_lost = LinkQuality(), 0
    while True:
        dues = [direction.due for direction in directions.values() if direction.due is not None]
        # `select` waits to the microsecond, which epoll does not.
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], timeout)
        for direction in directions.values():
            direction.deliver()
        for source, direction in directions.items():
            if source in readable:
                num_lost += direction.take(quality)
                direction.deliver()
        if sys.stdin in readable:
            if not (line := sys.stdin.readline()):
                return
            quality = LinkQuality(**json.loads(line))
            print(num_lost, flush=True)


def _open_device(name: str, close: ExitStack) -> int:
    """File descriptor of a new TUN device, which goes when it is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    close.callback(os.close, fd)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_WITHOUT_HEADER))
    return fd


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


if __name__ == "__main__":
    _pass_packets([int(fd) for fd in sys.argv[1:]])
