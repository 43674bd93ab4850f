"""Starts smg in front of all containers of a compose service: python3 gateway_workers.py HOST:PORT [ARGUMENTS OF SMG].

HOST resolves to every container of its service. A child process looks it up every two seconds and writes the addresses
to a file that smg watches, so that verifiers may be added and removed while the gateway runs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

FILE = Path(tempfile.gettempdir()) / "workers.json"
EVERY_S = 2.0


def look_up(host: str, port: str) -> list[str]:
    """Return the URL of each container; raises OSError when the name does not resolve."""
    found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    return sorted({f"grpc://{address[0]}:{port}" for *_, address in found})


def write(urls: list[str]) -> None:
    """Replace the file; smg reads the old or the new one, and no half of one."""
    staged = FILE.with_suffix(".new")
    staged.write_text(json.dumps({"version": 1, "workers": [{"url": url} for url in urls]}))
    staged.replace(FILE)


def follow(host: str, port: str, parent: int) -> None:
    """Write the addresses whenever they have changed, until the parent process has ended.

    A name that does not resolve changes nothing: smg's health checks find out who is gone.
    """
    written: list[str] = []
    while os.getppid() == parent:
        try:
            urls = look_up(host, port)
        except OSError:
            urls = written
        if urls != written:
            write(urls)
            written = urls
        time.sleep(EVERY_S)


def main() -> None:
    """Start the child process, then become smg."""
    host, _, port = sys.argv[1].rpartition(":")
    parent = os.getpid()
    if os.fork() == 0:
        follow(host, port, parent)
        return
    discovery = ["--discovery-provider", "file", "--discovery-file", str(FILE)]
    os.execvp("smg", ["smg", "launch", *discovery, *sys.argv[2:]])


if __name__ == "__main__":
    main()
