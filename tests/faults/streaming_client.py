"""A client process that is killed while the server streams to it."""

from __future__ import annotations

import subprocess
import sys

STREAMS = """
import sys
from draftwire import Client
client = Client(sys.argv[1])
streams = [client.generate([1, 2, 3], max_tokens=240, ignore_eos=True) for _ in range(int(sys.argv[2]))]
for stream in streams:
    next(stream)
print("streaming", flush=True)
for stream in streams:
    list(stream)
"""


def kill_client_in_mid_stream(address: str, num_streams: int) -> None:
    """Start a client with `num_streams` streams, and kill it with SIGKILL once every stream has begun."""
    command = [sys.executable, "-c", STREAMS, address, str(num_streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "streaming\n"
        client.kill()
