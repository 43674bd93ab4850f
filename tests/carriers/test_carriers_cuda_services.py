"""Both services on GPUs: shared GPU memory changes no token. When one service is killed, the other keeps serving, and
the memory is freed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from process_tree import all_ending
from services import DEMO, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.client import Completion
from draftwire.contract.errors import RequestError
from draftwire.v1 import draft_pb2
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.gpu

CUDA_IPC, BYTES = draft_pb2.CARRIER_CUDA_IPC, draft_pb2.CARRIER_BYTES
LAST_GPU = f"cuda:{max(torch.cuda.device_count(), 1) - 1}"
CONFIG = '{"num_speculative_tokens": 4, "draft_sample_method": "gumbel", "draft_logits": "dense"}'
SIZES = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-tokens", "4096", "--max-num-seqs", "8")
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
)
SLACK = 64 << 20
PATIENCE_S = 60.0


class Services:
    """A drafter on the last GPU, and two verifiers on the first: one shares GPU memory, one sends bytes."""

    def __init__(self, logs) -> None:
        self._logs = logs
        self.free_before = free_bytes()
        self.drafter = start_drafter(
            DEMO / "eagle3", DEMO / "target", "--device", LAST_GPU, *SIZES, log_path=logs / "drafter.log"
        )
        with ThreadPoolExecutor(2) as pool:
            self.shared, self.plain = pool.map(self.start_verifier, ("auto", "bytes"))

    def start_verifier(self, carriers: str) -> ServiceProcess:
        return start_verifier(
            *(DEMO / "target", [self.drafter.address], "--device", "cuda:0", *SIZES, "--speculative-config", CONFIG),
            *("--carriers", carriers, "--draft-deadline-ms", "off", "--no-adaptive-k"),
            log_path=self._logs / f"verifier-{carriers}.log",
        )

    def stop(self) -> None:
        for process in (self.drafter, self.shared, self.plain):
            process.kill()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    made = Services(tmp_path_factory.mktemp("cuda-carriers-logs"))
    yield made
    made.stop()


def free_bytes() -> int:
    """Return the free memory of the drafter's GPU."""
    return torch.cuda.mem_get_info(LAST_GPU)[0]


def shared_memory(*pids: int) -> set[str]:
    """Return the inodes of host memory that all processes have mapped; shared GPU memory comes with host memory too."""
    maps = (Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids)
    return set.intersection(*({line.split()[4] for line in lines if "/memfd:draftwire" in line} for lines in maps))


def run(client: Client) -> list[Completion]:
    greedy = [client.complete(prompt, temperature=0, max_tokens=40) for prompt in PROMPTS]
    sampled = [client.complete(prompt, temperature=0.8, seed=i, max_tokens=40) for i, prompt in enumerate(PROMPTS)]
    return greedy + sampled


def test_tokens_and_acceptance_are_those_of_features_in_messages(services):
    results = {}
    for process, carrier in ((services.shared, CUDA_IPC), (services.plain, BYTES)):
        with Client(process.address) as client:
            wait_for_drafter(client, services.drafter.address)
            results[carrier] = run(client)
            info = client.info()
        (status,) = info.drafters
        assert (status.features_carrier, status.logits_carrier) == (carrier, carrier)
        traffic = info.counters.traffic
        assert [entry.carrier for entry in traffic if entry.feature_bytes] == [carrier]
        assert [entry.carrier for entry in traffic if entry.logits_bytes] == [carrier]
    for shared, plain in zip(results[CUDA_IPC], results[BYTES], strict=True):
        assert shared.token_ids == plain.token_ids
        assert shared.statistics.accepted == plain.statistics.accepted
        assert shared.statistics.drafted == plain.statistics.drafted
    assert sum(sum(completion.statistics.accepted) for completion in results[CUDA_IPC]) > 50


def test_a_drafter_survives_its_verifier_and_serves_the_next(services):
    with all_ending(services.shared) as engine, Client(services.shared.address) as client:
        wait_for_drafter(client, services.drafter.address)
        first = client.complete(PROMPTS[0], temperature=0, max_tokens=40)
        free = free_bytes()
        shared = shared_memory(services.drafter.pid, engine)
        assert shared
        output = client.generate(PROMPTS[0], temperature=0, max_tokens=200, ignore_eos=True)
        next(output)
        os.kill(engine, signal.SIGKILL)
        services.shared.kill()
        with pytest.raises(RequestError):
            list(output)
    wait_for(lambda: not shared & shared_memory(services.drafter.pid), "the drafter has let go of the memory")
    wait_for(lambda: free_bytes() > free, "the memory is free")
    services.shared = services.start_verifier("auto")
    for process, carrier in ((services.plain, BYTES), (services.shared, CUDA_IPC)):
        with Client(process.address) as client:
            wait_for_drafter(client, services.drafter.address)
            again = client.complete(PROMPTS[0], temperature=0, max_tokens=40)
            (status,) = client.info().drafters
        assert again.token_ids == first.token_ids
        assert sum(again.statistics.accepted) > 0
        assert status.features_carrier == carrier


def test_requests_go_on_when_the_drafter_is_killed(services):
    with Client(services.shared.address) as client:
        first = client.complete(PROMPTS[0], temperature=0, max_tokens=40)
        services.drafter.kill()
        assert client.complete(PROMPTS[0], temperature=0, max_tokens=40).token_ids == first.token_ids


@pytest.mark.gpu(2)  # with one GPU, the verifiers also use memory of the drafter's GPU
def test_the_memory_of_a_killed_drafter_is_free(services):
    services.drafter.kill()  # already killed if the previous test ran
    end = time.monotonic() + PATIENCE_S
    while free_bytes() < services.free_before - SLACK:
        assert time.monotonic() < end, "the killed drafter's GPU has memory that is not free"
        time.sleep(0.1)
