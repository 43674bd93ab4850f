"""Kill either side at many points of the memory exchange.

Prints the number of interrupted exchanges for each victim. Fails if the other side hangs, crashes or keeps memory.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from draftwire.transport import Rendezvous, SharedSegments, meet
from draftwire.v1 import draft_pb2 as pb

CARRIERS = (pb.CARRIER_SHM, pb.CARRIER_BYTES)
SIZE = 32 << 20  # so that an exchange takes some milliseconds
CPU = torch.device("cpu")
PATIENCE_S = 2.0  # below the timeouts: the other side must notice a kill immediately


def cut_off(victim: str, seconds: float) -> bool:
    """Kill the victim's process after `seconds`; return whether the exchange was incomplete by then."""
    rendezvous = Rendezvous()

    def serve() -> SharedSegments:
        return rendezvous.serve(CARRIERS, CARRIERS, SIZE, CPU)

    def come() -> SharedSegments:
        return meet(rendezvous.encode(), CARRIERS, SIZE, CPU)

    killed, survives = (come, serve) if victim == "drafter" else (serve, come)
    peer = os.fork()
    if peer == 0:
        held = killed()
        time.sleep(PATIENCE_S)
        os._exit(len([held]))
    with ThreadPoolExecutor(1) as pool:
        surviving = pool.submit(survives)
        time.sleep(seconds)
        os.kill(peer, signal.SIGKILL)
        assert os.waitpid(peer, 0)[1] == signal.SIGKILL
        rendezvous.close()
        held = surviving.result(PATIENCE_S)
    return held.incoming is None or held.outgoing is None


def main() -> None:
    for victim in ("drafter", "verifier"):
        count = 0
        for step in range(25):
            count += cut_off(victim, 0.0008 * step)
            gc.collect()
            assert "/memfd:draftwire" not in Path("/proc/self/maps").read_text(), "memory is kept"
        print(victim, count)


if __name__ == "__main__":
    main()
