"""Both services as processes, and checks that hostile input has not harmed them."""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from freed_memory import freed_memory_returned
from fuzz_answers import FakeDrafter, Plan
from fuzz_streams import OWNER_STEPS, FindingError, Owner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.v1 import config_pb2, draft_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc as pb_grpc
from draftwire_bench.processes import ServiceProcess, start_drafter
from models import SENTENCES, ModelShelf, make_tokenizer

# Timeout of each operation, long enough for other load on the CPU. No other time is judged.
PATIENCE_S = 60.0
START_S = 600.0
NUM_FAKES = 4
TOP_N = 8
OWNERS = (1, 2)
OWNER_PAUSE_S = 0.03
# Permitted growth: allocator caches, and connections that are being closed. Memory is in bytes.
MAX_GROWTH = {"memory": 96 << 20, "files": 40, "threads": 24}
# Minimum number of samples, one per 400 cases, for the second test of memory: the rise of a line through the second
# half of the samples. By then caches are full, and a verifier's variation of 12 MiB has little effect on the line.
LEAST_SAMPLES = 100
MAX_RISE = 24 << 20
IMPATIENT = Path(__file__).with_name("impatient.py")


# Harmless errors that grpc logs: an answer to its client cannot be decoded, a header is not UTF-8, or a peer hung up
# before it got its error.
GRPC_TELLS = (
    b"ERROR grpc._common: Exception deserializing message!",
    b"ERROR grpc._cython.cygrpc: Invalid encoding on ",
    b"ERROR grpc._cython.cygrpc: ExecuteBatchError raised in core ",
)
LOG_RECORD = re.compile(rb"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Memory, files and threads of a process."""

    memory: int  # private resident bytes; shared memory depends on the peers
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Resources:
        """Return the present resources of a process."""
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(int(values["RssAnon"].split()[0]) * 1024, files, int(values["Threads"]))

    def excess(self, base: Resources) -> str:
        """Return what has grown by more than MAX_GROWTH since `base`, as text; empty if nothing has."""
        grown = [
            f"{name} from {getattr(base, name)} to {getattr(self, name)}"
            for name, most in MAX_GROWTH.items()
            if getattr(self, name) > getattr(base, name) + most
        ]
        return ", ".join(grown)


def rise(memory: Sequence[int]) -> int:
    """Return the rise of a line through the second half of the samples."""
    late = memory[len(memory) // 2 :]
    slope = np.polyfit(range(len(late)), late, 1)[0]
    return int(slope * (len(late) - 1))


@dataclass
class World:
    """The processes under test and channels to them."""

    drafter: ServiceProcess
    verifier: ServiceProcess
    fakes: list[FakeDrafter]
    wrong_answers: deque[Plan]
    to_drafter: grpc.aio.Channel
    to_verifier: grpc.aio.Channel
    metrics: dict[str, str]  # addresses of the metrics ports, by service
    known: dict[int, list[draft_pb2.Drafts]] = field(default_factory=dict)  # answers to each owner in its first run
    owners: dict[int, Owner] = field(default_factory=dict)
    base: dict[str, Resources] = field(default_factory=dict)
    log_read: dict[str, int] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)

    @property
    def processes(self) -> dict[str, ServiceProcess]:
        """Return the services by name."""
        return {"drafter": self.drafter, "verifier": self.verifier}

    @property
    def is_alive(self) -> bool:
        """Return whether both services run."""
        return all(process.running for process in self.processes.values())

    async def check(self) -> None:
        """Check that both services run, report SERVING, log no unexpected errors and answer valid peers as before.

        Raises
        ------
        FindingError
            If a check fails.
        """
        for name, process in self.processes.items():
            if not process.running:
                raise FindingError(f"the {name} ended with {process.returncode}:\n{process.log_text()[-4000:]}")
            with process.log_path.open("rb") as log:
                log.seek(self.log_read.get(name, 0))
                news = log.read()
                self.log_read[name] = log.tell()
            if record := unexpected_record(news):
                raise FindingError(f"the {name} has logged an error that it did not expect:\n{record}")
        for name, channel in (("drafter", self.to_drafter), ("verifier", self.to_verifier)):
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise FindingError(f"the {name} says {answer.status}")
        await asyncio.gather(*(self.recite(number) for number in range(3)), *(self.check_owner(one) for one in OWNERS))
        await pb_grpc.GenerationStub(self.to_verifier).GetVerifierInfo(pb.GetVerifierInfoRequest(), timeout=PATIENCE_S)
        for name, address in self.metrics.items():
            page = await asyncio.to_thread(read_page, f"http://{address}/metrics")
            if "\ndraftwire_" not in page:
                raise FindingError(f"the metrics of the {name} are {page!r}")

    async def check_resources(self) -> None:
        """Wait until both services hold no more resources than at the first call; raise FindingError at the timeout."""
        for name, process in self.processes.items():
            base = self.base.setdefault(name, Resources.of(process.pid))
            deadline = time.monotonic() + PATIENCE_S
            while excess := Resources.of(process.pid).excess(base):
                if time.monotonic() > deadline:
                    raise FindingError(f"the {name} has grown: {excess}")
                await asyncio.sleep(0.2)
            self.memory.setdefault(name, []).append(Resources.of(process.pid).memory)

    def check_memory(self) -> None:
        """Check that neither service's memory rises steadily; raise FindingError if it does."""
        for name, samples in self.memory.items():
            if len(samples) >= LEAST_SAMPLES and rise(samples) > MAX_RISE:
                sizes = ", ".join(str(sample >> 20) for sample in samples)
                raise FindingError(f"the memory of the {name} rises, MiB: {sizes}")

    async def recite(self, which: int, length: int = 24) -> None:
        """Check the output of a client with a known answer: the rest of a sentence that the target has memorized."""
        ids = make_tokenizer().encode(SENTENCES[which]).ids[: 6 + length]
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids[:6]),
            sampling_params=config_pb2.SamplingParams(temperature=0, max_tokens=length),
            request_id=f"recital-{which}",
        )
        got: list[int] = []
        async for response in pb_grpc.GenerationStub(self.to_verifier).Generate(request, timeout=PATIENCE_S):
            got += response.token_ids
        if got != ids[6:]:
            raise FindingError(f"sentence {which} came as {make_tokenizer().decode(got)!r}")

    async def check_owner(self, which: int, pause_s: float = 0.0) -> None:
        """Run an owner, a verifier whose steps never change. Its answers must be those of its first run."""
        owner = self.owners[which] = Owner(self.to_drafter, which, PATIENCE_S)
        try:
            await owner.open()
            answers = []
            for _ in range(OWNER_STEPS):
                answers.append(await owner.step())
                await asyncio.sleep(pause_s)
        finally:
            await owner.close()
        owner.compare(answers, self.known.setdefault(which, answers))

    @property
    def open_rows(self) -> list[tuple[int, int]]:
        """Return (id, number of rows) of every open sequence of the owners."""
        return [row for owner in self.owners.values() for row in owner.rows.items()]

    @asynccontextmanager
    async def owners_about(self) -> AsyncIterator[None]:
        """Run all owners repeatedly during the context. Each must have finished at least one run when it ends."""
        turns = dict.fromkeys(OWNERS, 0)

        async def repeat(which: int) -> None:
            while not is_over.is_set():
                await self.check_owner(which, OWNER_PAUSE_S)
                turns[which] += 1

        is_over = asyncio.Event()
        tasks = [asyncio.ensure_future(repeat(which)) for which in OWNERS]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
        if not all(turns.values()):
            raise FindingError(f"turns of the owners: {turns}")


def unexpected_record(log: bytes) -> str:
    """Return the beginning of the first log record with a traceback, except of gRPC's; empty if there is none."""
    for record in LOG_RECORD.split(log):
        if b"Traceback" in record and not any(text in record for text in GRPC_TELLS):
            return record[:4000].decode(errors="replace")
    return ""


def read_page(url: str) -> str:
    """Return the text at a URL."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return response.read().decode()


@asynccontextmanager
async def opened_world(shelf: ModelShelf, logs: Path, top_n: int) -> AsyncIterator[World]:
    """Start both services and fake drafters. The verifier takes draft logits, `top_n` of each draft or all (0)."""
    target, head = shelf.target("llama"), shelf.head("llama", "good")
    wrong_answers: deque[Plan] = deque()
    fakes = [FakeDrafter(top_n, wrong_answers, is_direct=number % 2 == 1) for number in range(NUM_FAKES)]
    servers = [await fake.start() for fake in fakes]
    common = ("--device", "cpu", "--metrics-listen", "127.0.0.1:0")
    with freed_memory_returned():
        drafter = await asyncio.to_thread(
            start_drafter, head, target, *common, log_path=logs / "drafter.log", timeout_s=START_S
        )
    logits = f'{{"top_n": {top_n}}}' if top_n else '"dense"'
    config = f'{{"num_speculative_tokens": 4, "draft_sample_method": "gumbel", "draft_logits": {logits}}}'
    addresses = ",".join([drafter.address, *(fake.address for fake in fakes)])
    options = ["--target", str(target), "--drafters", addresses, "--listen", "127.0.0.1:0", *common]
    options += ["--speculative-config", config, "--draft-deadline-ms", "1000", "--no-adaptive-k"]
    make_verifier: Callable[..., Awaitable[ServiceProcess]] = asyncio.to_thread
    program = (sys.executable, str(IMPATIENT))
    with freed_memory_returned():
        verifier = await make_verifier(
            ServiceProcess, ["verifier", *options], logs / "verifier.log", START_S, program=program
        )
    channel_options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with (
            grpc.aio.insecure_channel(drafter.address, options=channel_options) as to_drafter,
            grpc.aio.insecure_channel(verifier.address, options=channel_options) as to_verifier,
        ):
            metrics_line = re.compile(r"metrics on http://(\S+)/metrics")
            processes = {"drafter": drafter, "verifier": verifier}
            metrics = {name: metrics_line.search(process.log_text())[1] for name, process in processes.items()}
            yield World(drafter, verifier, fakes, wrong_answers, to_drafter, to_verifier, metrics)
    finally:
        verifier.kill()
        drafter.kill()
        for server in servers:
            await server.stop(None)
