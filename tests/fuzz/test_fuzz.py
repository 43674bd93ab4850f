"""Hostile input of every kind against both services as processes; `make test-fuzz` plays many more cases.

FUZZ_CASES is the number of cases, FUZZ_SEED their random seed; FUZZ_ONLY=N plays only case number N.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import torch
from freed_memory import freed_memory_returned
from fuzz_cases import KINDS, Outcomes
from fuzz_streams import OWNER_STEPS, FindingError, Owner
from fuzz_theft import steal
from fuzz_world import LEAST_SAMPLES, MAX_RISE, PATIENCE_S, TOP_N, Resources, World, opened_world, rise

from drafter_service.engine import engine as engine_module
from drafter_service.engine.engine import DraftEngine
from drafter_service.engine.session import Session
from drafter_service.heads import load_head
from drafter_service.limits import EngineLimits
from drafter_service.server.engine_thread import EngineThread
from drafter_service.server.service import DraftingService
from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.v1.draft_pb2_grpc import add_DraftingServicer_to_server
from models import CONTEXT, ModelShelf, session_shelf

CASES = int(os.environ.get("FUZZ_CASES", "1500"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
ONLY = os.environ.get("FUZZ_ONLY")
MAX_FINDINGS = 20
AT_ONCE = 16
BATCH = 400
# Eight threads free 12 MiB each, after a larger block has raised glibc's limits; prints the memory before and after.
FREEING = """
import threading

def memory():
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")]

def run():
    bytearray(12 << 20)
    turn.wait()

turn = threading.Barrier(9)
bytearray(16 << 20)
before = memory()
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
turn.wait()
print(*before, *memory())
"""

pytestmark = [pytest.mark.xdist_group("fuzz"), pytest.mark.timeout(7200)]


def tell(text: str) -> None:
    """Print `text` at once, also in a process of pytest-xdist."""
    print(text, file=sys.stderr, flush=True)


class Campaign:
    """Cases in batches, with a check of both services after each batch."""

    def __init__(self, world: World, seed: int, cases: int, variant: int) -> None:
        """`variant` selects different cases with the same seed."""
        self._world = world
        self._seed = seed
        self._variant = variant
        self._cases = cases
        self.counts: dict[str, Outcomes] = {kind: Counter() for kind in KINDS}
        self._findings: list[str] = []

    @property
    def total(self) -> int:
        """Return the number of judged cases."""
        return sum(sum(outcomes.values()) for outcomes in self.counts.values())

    async def run(self) -> None:
        """Play batches until there are enough cases."""
        await self._world.check()
        first = 0
        while self.total < self._cases:
            num_known = len(self._findings)
            await self._play(range(first, first + BATCH))
            first += BATCH
            tell("\n".join([f"{self.total} cases, {first} numbers", *self._findings[num_known:]]))

    async def play_one(self, index: int) -> None:
        """Play a single case again."""
        await self._world.check()
        await self._play(range(index, index + 1))

    async def _play(self, indices: range) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        try:
            async with self._world.owners_about():
                findings = await asyncio.gather(*(self._judge(index, turns) for index in indices))
                self._findings += [text for text in findings if text]
            await self._world.check()
            await self._world.check_resources()
        except Exception as error:
            finding = f"after the cases {indices.start} to {indices.stop - 1}: {type(error).__name__}: {error}"
            self._findings.append(finding)
            if len(self._findings) > MAX_FINDINGS or not self._world.is_alive:
                self.check()

    def check(self) -> None:
        """Raise FindingError if there are findings."""
        if self._findings:
            raise FindingError("\n".join([f"FUZZ_SEED={self._seed}", *self._findings]))

    async def _judge(self, index: int, turns: asyncio.Semaphore) -> str:
        """Play a case; return the finding as text, empty if there is none."""
        rng = Random(f"{self._seed + self._variant}/{index}")
        shares = [share for share, _ in KINDS.values()]
        kind = rng.choices(list(KINDS), shares)[0]
        async with turns:
            try:
                self.counts[kind] += await asyncio.wait_for(KINDS[kind][1](self._world, rng), 2 * PATIENCE_S)
            except TimeoutError:
                return f"FUZZ_ONLY={index} ({kind}): hangs"
            except Exception as error:
                return f"FUZZ_ONLY={index} ({kind}): {type(error).__name__}: {error}"
        return ""

    def report(self, before: dict[str, Resources], seconds: float) -> str:
        """Return the outcomes of the cases and the services' resources, as text."""
        lines = [f"{self.total} cases in {seconds:.0f} s, seed {self._seed}"]
        for kind, outcomes in self.counts.items():
            parts = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
            lines.append(f"  {kind}: {sum(outcomes.values())} ({parts})")
        for name, process in self._world.processes.items():
            old, now = before[name], Resources.of(process.pid)
            lines.append(
                f"  {name}: memory {old.memory >> 20} -> {now.memory >> 20} MiB, files {old.files} -> {now.files}, "
                f"threads {old.threads} -> {now.threads}"
            )
        return "\n".join(lines)


def test_level_memory_does_not_rise_and_a_leak_does() -> None:
    noise = [(number * 7919 % 13 - 6) << 20 for number in range(LEAST_SAMPLES)]
    warming = [min(number, LEAST_SAMPLES // 3) << 23 for number in range(LEAST_SAMPLES)]
    leaking = [number * (MAX_RISE // 8) for number in range(LEAST_SAMPLES)]
    assert abs(rise([one + other for one, other in zip(noise, warming, strict=True)])) < MAX_RISE
    assert rise([one + other for one, other in zip(noise, leaking, strict=True)]) > MAX_RISE


def test_freed_memory_of_threads_is_not_counted() -> None:
    with freed_memory_returned():
        before, after = subprocess.check_output([sys.executable, "-c", FREEING]).split()
    assert (int(after) - int(before)) << 10 < MAX_RISE / 4


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    return session_shelf(tmp_path_factory)


@pytest.mark.parametrize("top_n", [0, TOP_N], ids=["dense", "top_n"])
def test_hostile_input_harms_nobody(top_n: int, shelf: ModelShelf, tmp_path: Path) -> None:
    async def play() -> None:
        async with opened_world(shelf, tmp_path, top_n) as world:
            campaign = Campaign(world, SEED, CASES // 2, variant=top_n)
            await world.check()
            before = {name: Resources.of(process.pid) for name, process in world.processes.items()}
            began = time.monotonic()
            if ONLY is not None:
                await campaign.play_one(int(ONLY))
            else:
                await campaign.run()
            tell(campaign.report(before, time.monotonic() - began))
            campaign.check()
            world.check_memory()

    asyncio.run(play())


class CarelessSlots(dict[int, int]):
    """A session's slots by sequence id, in a drafter that confuses sessions as `fault` selects."""

    fault = ""
    sessions: list[dict[int, int]] = []  # noqa: RUF012  # shared by all instances on purpose

    def __init__(self) -> None:
        super().__init__()
        self.sessions.append(self)

    def get(self, sequence_id: int, default: Any = None) -> Any:
        holders = [slots for slots in self.sessions if sequence_id in slots]
        if self.fault == "names" and sequence_id not in self and holders:
            return holders[0][sequence_id]
        if self.fault == "numbers" and holders:
            return holders[0][sequence_id]
        return super().get(sequence_id, default)

    def pop(self, sequence_id: int, default: Any = None) -> Any:
        holders = [slots for slots in self.sessions if sequence_id in slots]
        if self.fault == "closes" and sequence_id not in self and holders:
            return holders[0].pop(sequence_id)
        return super().pop(sequence_id, default)


@pytest.mark.parametrize("fault", ["", "names", "numbers", "closes"])
def test_a_drafter_that_confuses_its_verifiers_is_found_out(
    fault: str, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CarelessSlots, "fault", fault)
    monkeypatch.setattr(CarelessSlots, "sessions", [])
    monkeypatch.setattr(engine_module, "Session", lambda *terms: Session(*terms, slots=CarelessSlots()))
    head_dir, target_dir = shelf.head("llama", "good"), shelf.target("llama")
    cpu = torch.device("cpu")
    head = load_head(head_dir, target_dir, torch.float32, cpu)
    engine = EngineThread(DraftEngine(head, EngineLimits(max_model_len=CONTEXT), torch.float32, cpu), lambda: None)

    async def play() -> None:
        service = DraftingService(engine, "head", torch.float32)
        server = grpc.aio.server(interceptors=[service.interceptor], options=CHANNEL_OPTIONS)
        add_DraftingServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
                owner = Owner(channel, 1, PATIENCE_S)
                await owner.open()
                known = [await owner.step() for _ in range(OWNER_STEPS)]
                await owner.close()
                for number in range(30):
                    await steal(channel, Random(number), 1, known, PATIENCE_S)
        finally:
            await server.stop(None)

    engine.start()
    try:
        with pytest.raises(FindingError) if fault else nullcontext():
            asyncio.run(play())
    finally:
        engine.stop()
