"""A link to a network namespace that loses packets.

Two TUN devices, one here and one in the namespace, and a thread that passes packets between them: it loses packets on
every Linux, where the kernel's own queueing discipline for that (netem) is often left out.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Self

_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
_MAX_PACKET = 65536


class LossyLink:
    """Exists from `__enter__` to `__exit__`.

    Attributes
    ----------
    address
        Of the namespace's end, an IPv4 address.
    program
        Command that runs `draftwire` in the namespace.
    loss
        Share of the packets that are lost, each way.
    num_lost
        Packets lost so far.
    """

    def __init__(self) -> None:
        """
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
        self.loss = 0.0
        self.num_lost = 0
        here, there = f"dw{os.getpid() % 10**7}", f"dx{os.getpid() % 10**7}"
        with ExitStack() as close:
            _run("ip", "netns", "add", name)
            close.callback(_run, "ip", "netns", "delete", name)
            self._ends = [_open_device(one, close) for one in (here, there)]
            _run("ip", "address", "add", f"{first}/30", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run("ip", "link", "set", there, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{self.address}/30", "dev", there)
            for device in ("lo", there):
                _run("ip", "-n", name, "link", "set", device, "up")
            self._wake, self._woken = os.pipe()
            for fd in (self._wake, self._woken):
                close.callback(os.close, fd)
            self._close = close.pop_all()
        self._thread = threading.Thread(target=self._pass_packets, daemon=True)
        self._thread.start()

    def _pass_packets(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in (self._wake, *self._ends):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake:
                        return
                    packet = os.read(key.fd, _MAX_PACKET)
                    if random.random() < self.loss:
                        self.num_lost += 1
                    else:
                        os.write(self._ends[key.fd == self._ends[0]], packet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._woken, b"x")
        self._thread.join()
        self._close.close()


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
