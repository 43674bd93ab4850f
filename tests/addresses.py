"""Addresses for services that keep their address after a restart."""

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_address() -> str:
    """Return an address of this machine that nobody listens on.

    The port is below the kernel's ephemeral range, of which an outgoing connection could take any port first. The port
    is random, so that concurrent tests do not collide.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    ports = random.SystemRandom()
    while True:
        port = ports.randrange(max(1024, end // 2), end)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
