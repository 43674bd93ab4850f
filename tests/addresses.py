"""Addresses for services that must be found again at the same place after a restart."""

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_address() -> str:
    """An address of this machine that nobody listens on.

    Its port lies below those that the kernel gives to outgoing connections, any of which could take it before the
    service does, and is drawn at random, so that tests that run side by side do not meet.
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
