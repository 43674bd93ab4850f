"""Both services as processes: shared memory changes no token, is counted, and is freed when a service is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from addresses import free_address
from waiting import wait_for

from drafter_service.engine.engine import DraftEngine
from drafter_service.heads import load_head
from drafter_service.limits import EngineLimits
from drafter_service.server.engine_thread import EngineThread
from drafter_service.server.service import DraftingService
from draftwire import Client
from draftwire.client import Completion
from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.errors import DraftwireError
from draftwire.v1 import draft_pb2, draft_pb2_grpc
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from models import SENTENCES

pytestmark = pytest.mark.xdist_group("carriers")

PATIENCE_S = 60.0
CONFIG = '{"num_speculative_tokens": 4, "draft_sample_method": "gumbel", "draft_logits": "dense"}'
COMMON = ("--device", "cpu", "--draft-deadline-ms", "off", "--speculative-config", CONFIG)
SHM, BYTES = draft_pb2.CARRIER_SHM, draft_pb2.CARRIER_BYTES


class Services:
    """A drafter and two verifiers: one shares memory and fuses features, the other sends raw features in messages."""

    def __init__(self, shelf, logs: Path) -> None:
        self.head, self.target = shelf.head("llama", "good"), shelf.target("llama")
        self._logs = logs
        self.drafter_address = free_address()
        with ThreadPoolExecutor(3) as pool:
            verifiers = [pool.submit(self._start_verifier, carriers) for carriers in ("auto", "bytes")]
            listen = ("--listen", self.drafter_address, "--device", "cpu")
            self.drafter = start_drafter(self.head, self.target, *listen, log_path=logs / "drafter.log")
        self.auto, self.bytes = (starting.result() for starting in verifiers)

    def _start_verifier(self, carriers: str) -> ServiceProcess:
        extra = (*COMMON, "--carriers", carriers, *(("--no-fuse-features",) if carriers == "bytes" else ()))
        return start_verifier(
            self.target, [self.drafter_address], *extra, log_path=self._logs / f"verifier-{carriers}.log"
        )

    def stop(self) -> None:
        for process in (self.drafter, self.auto, self.bytes):
            process.kill()


@pytest.fixture(scope="module")
def services(shelf, tmp_path_factory):
    made = Services(shelf, tmp_path_factory.mktemp("carriers-logs"))
    yield made
    made.stop()


def leftovers() -> set[str]:
    """Return the names of shared memory and sockets that could outlive a process, without those of concurrent tests."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@draftwire-" in line]
    beside = open_files(descendants(os.getppid()) - descendants(os.getpid())) if lines else set()
    sockets = {line[-1] for line in lines if f"socket:[{line[-2]}]" not in beside}
    return sockets | {name for name in os.listdir("/dev/shm") if name.startswith(("draftwire", "psm_", "torch_"))}


def descendants(pid: int) -> set[int]:
    """Return the process and all processes that it has started, directly or indirectly."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = {pid}, {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def open_files(pids: set[int]) -> set[str]:
    """Return the targets of the processes' file descriptors, as named in /proc."""
    files: set[str] = set()
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):
            files.add(os.readlink(path))
    return files


def mappings(pid: int) -> int:
    """Return the number of segments that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:draftwire")


def own_mappings() -> int:
    """Return the number of segments that this process has mapped, after a garbage collection."""
    gc.collect()
    return mappings(os.getpid())


def connected(client: Client) -> pb.DrafterStatus:
    """Wait until the drafter is ready; return its status."""
    wait_for(lambda: client.info().drafters[0].state == pb.DRAFTER_STATE_READY, "the drafter is connected")
    return client.info().drafters[0]


def run(client: Client) -> list[Completion]:
    greedy = [client.complete(text[:20], temperature=0, max_tokens=30) for text in SENTENCES[:4]]
    return greedy + [
        client.complete(text[:20], temperature=0.8, max_tokens=30, seed=i) for i, text in enumerate(SENTENCES[:4])
    ]


def test_tokens_and_acceptance_equal_those_of_raw_features(services):
    results = {}
    for name, verifier in (("auto", services.auto), ("bytes", services.bytes)):
        with Client(verifier.address) as client:
            status = connected(client)
            results[name] = (run(client), client.info())
        carrier = SHM if name == "auto" else BYTES
        assert (status.features_carrier, status.logits_carrier) == (carrier, carrier)
        assert status.features_are_fused == status.is_direct == (name == "auto")
        assert [traffic.carrier for traffic in results[name][1].counters.traffic if traffic.feature_bytes] == [carrier]
    for shared, plain in zip(results["auto"][0], results["bytes"][0], strict=True):
        assert shared.token_ids == plain.token_ids
        assert shared.statistics.accepted == plain.statistics.accepted
        assert shared.statistics.drafted == plain.statistics.drafted
    assert sum(sum(completion.statistics.accepted) for completion in results["auto"][0]) > 50
    (features, logits), (raw_features, raw_logits) = (traffic_of(results[name][1]) for name in ("auto", "bytes"))
    assert (3 * features, logits) == (raw_features, raw_logits)
    shared, plain = (results[name][1].drafters[0] for name in ("auto", "bytes"))
    assert 3 * shared.feature_row_bytes == plain.feature_row_bytes
    assert plain.sent_message_bytes - shared.sent_message_bytes > 0.95 * raw_features
    assert plain.received_message_bytes - shared.received_message_bytes > 0.95 * logits


def traffic_of(info: pb.GetVerifierInfoResponse) -> tuple[int, int]:
    """Return the bytes of features and of logits, summed over all carriers."""
    traffic = info.counters.traffic
    return sum(entry.feature_bytes for entry in traffic), sum(entry.logits_bytes for entry in traffic)


class Load:
    """Sends requests one after another until the context exits or the server is killed."""

    def __init__(self, address: str) -> None:
        self._stopping = threading.Event()
        self.num_done = 0
        self._thread = threading.Thread(target=self._run, args=(address,))

    def _run(self, address: str) -> None:
        with Client(address) as client:
            while not self._stopping.is_set():
                try:
                    client.complete("The river", temperature=0.9, max_tokens=40)
                    self.num_done += 1
                except DraftwireError:
                    return

    def __enter__(self) -> Load:
        self._thread.start()
        wait_for(lambda: self.num_done > 0, "a request is done")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def test_a_killed_drafter_leaves_nothing(services):
    before = leftovers()
    with Load(services.auto.address) as load:
        assert mappings(services.auto.pid) == mappings(services.drafter.pid) == 3  # both directions and the rings
        services.drafter.kill()
        wait_for(lambda: mappings(services.auto.pid) == 0, "the verifier has let go of the memory")
        done = load.num_done
        wait_for(lambda: load.num_done > done + 1, "requests go on")
    wait_for(lambda: leftovers() <= before, "nothing is left")


@contextlib.contextmanager
def drafter_in_this_process(services: Services) -> Iterator[None]:
    """Run a drafter in this process at the killed drafter's address."""
    cpu = torch.device("cpu")
    head = load_head(services.head, services.target, torch.float32, cpu)
    engine = EngineThread(DraftEngine(head, EngineLimits(max_model_len=256), torch.float32, cpu), lambda: None)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> grpc.aio.Server:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        draft_pb2_grpc.add_DraftingServicer_to_server(DraftingService(engine, "good", torch.float32), server)
        server.add_insecure_port(services.drafter_address)
        await server.start()
        return server

    async def stop() -> None:
        await server.stop(None)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    engine.start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield
    asyncio.run_coroutine_threadsafe(stop(), loop).result()
    engine.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_killed_verifier_leaves_nothing(services):
    before = leftovers()
    with drafter_in_this_process(services):
        wait_for(lambda: own_mappings() == mappings(services.auto.pid) == 3, "memory is shared anew")
        with Load(services.auto.address):
            services.auto.kill()
            wait_for(lambda: own_mappings() == 0, "the drafter has let go of the memory")
    wait_for(lambda: leftovers() <= before, "nothing is left")


def test_a_peer_killed_while_sharing_memory_leaves_nothing():
    before = leftovers()
    # In a separate process: this one has threads, and a process with threads must not fork.
    script = Path(__file__).with_name("kill_while_sharing.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert set(counts) == {"drafter", "verifier"}
    assert min(map(int, counts.values())) > 0, "every exchange was over before the kill"
    wait_for(lambda: leftovers() <= before, "nothing is left")
