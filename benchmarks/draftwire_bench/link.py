"""A link to a network namespace with a configurable delay, rate and loss.

A process forwards packets between two TUN devices, one in each namespace. This works on every Linux, whereas the
kernel's queueing discipline netem is often not available.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Self

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
# The virtio header, which tells the kernel how to segment the packet.
_HEADER_BYTES = 10
_MAX_PACKET = _HEADER_BYTES + 65536
MEASURED_BYTES = 8 << 20  # per transfer


@dataclass(frozen=True)
class LinkQuality:
    """The treatment of packets in each direction."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None  # None: no limit
    loss: float = 0.0  # share of the packets


@dataclass(frozen=True)
class Reached:
    """The measured quality of a TCP connection to the namespace."""

    round_trip_s: float  # of one byte, the minimum of several
    bytes_per_s: float  # the maximum of several transfers


class Link:
    """A link that is closed on exit of the context.

    Attributes:
        address: IPv4 address of the namespace's end.
        program: Command that runs `draftwire` in the namespace.
    """

    def __init__(self, mtu: int = 1500) -> None:
        """`mtu` is the size of the largest packet, in bytes.

        Raises:
            OSError: Without TUN devices, the `ip` command, or permission to create devices and namespaces.
        """
        # One /30 per process from the range for network benchmarks (RFC 2544).
        net = 4 * (os.getpid() % (1 << 14))
        first, self.address = (f"198.{18 + (net >> 16)}.{net >> 8 & 255}.{(net & 255) + host}" for host in (1, 2))
        name = f"draftwire-{os.getpid()}"
        self._python = ("ip", "netns", "exec", name, sys.executable)
        self.program = (*self._python, "-m", "draftwire_cli")
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
            # A separate process, because threads of this process would delay packets.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftwire_bench.link", *map(str, ends)],
                pass_fds=ends,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            close.callback(self._end)
            self._close = close.pop_all()

    def set(self, quality: LinkQuality) -> int:
        """Set the treatment of later packets, and return the number of lost packets so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(quality)) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def measure(self) -> Reached:
        """Measure round trip and throughput, which may be lower than the rate that is set on a slow host."""
        command = [*self._python, "-m", "draftwire_bench.link", "--sink", self.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:
            try:
                assert sink.stdout is not None
                port = int(sink.stdout.readline())
                with socket.create_connection((self.address, port)) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    _transfer(connection, MEASURED_BYTES)  # opens the congestion window
                    round_trip = min(_transfer(connection, 1) for _ in range(20))
                    taken = min(_transfer(connection, MEASURED_BYTES) for _ in range(5)) - round_trip
            finally:
                sink.kill()
        return Reached(round_trip, MEASURED_BYTES / taken)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()


class _Direction:
    """One direction of the link, with two threads because copying packets takes most of the time."""

    def __init__(self, source: int, sink: int) -> None:
        self.quality = LinkQuality()
        self.num_lost = 0
        self._source, self._sink = source, sink
        self._packets: SimpleQueue[tuple[float, bytes]] = SimpleQueue()  # (monotonic time of arrival, packet)
        for run in (self._take, self._deliver):
            threading.Thread(target=run, daemon=True).start()

    def _take(self) -> None:
        free = 0.0  # when all earlier packets are transmitted
        while True:
            packet = os.read(self._source, _MAX_PACKET)
            quality = self.quality
            if random.random() < quality.loss:
                self.num_lost += 1
                continue
            seconds = 0.0 if quality.bytes_per_s is None else (len(packet) - _HEADER_BYTES) / quality.bytes_per_s
            free = max(free, time.monotonic()) + seconds
            self._packets.put((free + quality.delay_s, packet))

    def _deliver(self) -> None:
        while True:
            arrival, packet = self._packets.get()
            if (left := arrival - time.monotonic()) > 0:
                time.sleep(left)
            os.write(self._sink, packet)


def _pass_packets(ends: list[int]) -> None:
    """Read a `LinkQuality` from each line of the input and print the number of lost packets, until the input ends."""
    directions = (_Direction(*ends), _Direction(*reversed(ends)))
    for line in sys.stdin:
        for direction in directions:
            direction.quality = LinkQuality(**json.loads(line))
        print(sum(direction.num_lost for direction in directions), flush=True)


def _transfer(connection: socket.socket, num_bytes: int) -> float:
    """Return the seconds until the sink has confirmed the bytes."""
    message = num_bytes.to_bytes(8, "little") + bytes(num_bytes)
    began = time.monotonic()
    connection.sendall(message)
    if not connection.recv(1):
        raise OSError("the sink has ended")
    return time.monotonic() - began


def _take_in(address: str) -> None:
    """Print the sink's port, then confirm messages of one connection, each an 8-byte length with as many bytes."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection = server.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 20)
        while head := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left and (count := connection.recv_into(buffer, min(left, len(buffer)))):
                left -= count
            connection.sendall(b"\0")


def _open_device(name: str, close: ExitStack) -> int:
    """Return the file descriptor of a new TUN device, which exists until the descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    close.callback(os.close, fd)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    # Forwards large segments as network cards do, because forwarding single packets is too slow.
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return fd


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


if __name__ == "__main__":
    if sys.argv[1] == "--sink":
        _take_in(sys.argv[2])
    else:
        _pass_packets([int(fd) for fd in sys.argv[1:]])
