"""Both services under mixed load with random faults, and whether anything grows.

    python tests/faults/soak.py --minutes 20 --seed 1

One verifier and three drafters of the demo pair on the CPU. The first drafter is killed and started again; the second
shares memory with the verifier; the network of the third is at fault. All but the first live through the whole run and
are judged. Exit code 1 when a request failed, a greedy output changed or something grew.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from census import Census, judge, take_census
from drafters import Drafter
from rich.console import Console
from rich.table import Table
from tcp_proxy import TcpProxy

from draftwire.bench.services import wait_for_drafters
from draftwire.client import AsyncClient, Client
from draftwire.demo import PROMPTS
from draftwire.errors import DraftwireError
from draftwire.processes import ServiceProcess, start_verifier

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CLIENTS = 6
MAX_TOKENS = 48
# Two log probabilities nearer than this are within rounding: drafted and draft-less steps may tell them apart.
ROUNDING = 2e-4
SAMPLE_EVERY_S = 5.0
# Seconds between two faults, and how long one lasts.
BETWEEN_S = (2.0, 10.0)
LASTS_S = (0.5, 12.0)
REPORT_EVERY_S = 60.0


@dataclass
class Traffic:
    """Clients that never try again, each with one request after another, of every kind."""

    address: str
    expected: dict[str, tuple[int, ...]]  # greedy output by prompt
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    accepted: int = 0
    verify_steps: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until `stopping`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with AsyncClient(self.address) as client, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(client))

    async def _client(self, client: AsyncClient) -> None:
        kinds = {"greedy": 5, "sampled": 4, "cancelled": 1, "slow": 1}
        ways = {"greedy": self._greedy, "sampled": self._sampled, "cancelled": self._cancelled, "slow": self._slow}
        while not self.stopping.is_set():
            (kind,) = self.draw.choices(list(kinds), list(kinds.values()))
            self.counts[kind] += 1
            try:
                await ways[kind](client)
            except DraftwireError as error:
                self.failures.append(f"{kind}: {error}")
            await asyncio.sleep(self.draw.uniform(0.0, 0.2))

    async def _greedy(self, client: AsyncClient) -> None:
        prompt = self.draw.choice(list(self.expected))
        completion = await client.complete(prompt, temperature=0, max_tokens=MAX_TOKENS)
        self.accepted += sum(completion.statistics.accepted)
        self.verify_steps += completion.statistics.verify_steps
        if completion.token_ids != self.expected[prompt]:
            self.failures.append(f"greedy output changed: {prompt!r}")

    async def _sampled(self, client: AsyncClient) -> None:
        length = self.draw.randint(1, 2 * MAX_TOKENS)
        options = {"temperature": self.draw.choice([0.5, 1.0]), "top_p": self.draw.choice([0.9, 1.0])}
        prompt = self.draw.choice(PROMPTS)[: self.draw.randint(4, 80)]
        completion = await client.complete(prompt, max_tokens=length, ignore_eos=True, **options)
        if len(completion.token_ids) != length:
            self.failures.append(f"{len(completion.token_ids)} tokens instead of {length}")

    async def _cancelled(self, client: AsyncClient) -> None:
        async with client.generate(self.draw.choice(PROMPTS), max_tokens=256) as stream:
            async for _ in stream:
                if self.draw.random() < 0.1:
                    break

    async def _slow(self, client: AsyncClient) -> None:
        async with client.generate(self.draw.choice(PROMPTS), max_tokens=MAX_TOKENS) as stream:
            async for _ in stream:
                await asyncio.sleep(0.1)


class Faults:
    """One fault after another, drawn from a seed."""

    def __init__(self, killed: Drafter, living: Sequence[Drafter], proxy: TcpProxy, draw: random.Random) -> None:
        """`killed` is killed now and then; one of the `living` is behind the `proxy`."""
        self._killed = killed
        self._living = living
        self._proxy = proxy
        self._draw = draw
        self.counts: Counter[str] = Counter()
        self._untold: list[str] = []

    def tell(self) -> str:
        """The faults that have begun since the last time."""
        told, self._untold = self._untold, []
        return ", ".join(told) or "none"

    def next(self) -> None:
        """Waits a while, then has a fault come and go."""
        time.sleep(self._draw.uniform(*BETWEEN_S))
        faults: list[Callable[[float], None]] = [
            self.kill, self.stop_one, self.stop_other, self.cut, self.delay, self.silence, self.narrow
        ]  # fmt: skip
        fault = self._draw.choice(faults)
        self.counts[fault.__name__] += 1
        seconds = self._draw.uniform(*LASTS_S)
        self._untold.append(f"{fault.__name__} {seconds:.1f} s")
        fault(seconds)

    def kill(self, seconds: float) -> None:
        """SIGKILL, and a new start later."""
        self._killed.kill()
        time.sleep(seconds)
        self._killed.start()

    def stop_one(self, seconds: float) -> None:
        """SIGSTOP and SIGCONT."""
        _stop(self._killed.process, seconds)

    def stop_other(self, seconds: float) -> None:
        """SIGSTOP and SIGCONT of one that lives through the run."""
        _stop(self._draw.choice(self._living).process, seconds)

    def cut(self, seconds: float) -> None:
        """The connection is cut in mid-message, either way."""
        self._proxy.cut(from_service=self._draw.random() < 0.5)
        time.sleep(seconds)

    def delay(self, seconds: float) -> None:
        """What the drafter says comes late."""
        self._proxy.delay_s = self._draw.uniform(0.05, 1.0)
        time.sleep(seconds)
        self._proxy.delay_s = 0.0

    def silence(self, seconds: float) -> None:
        """Nothing passes."""
        self._proxy.is_silent = True
        time.sleep(seconds)
        self._proxy.is_silent = False

    def narrow(self, seconds: float) -> None:
        """A few bytes pass."""
        self._proxy.bytes_per_s = self._draw.uniform(1e4, 1e6)
        time.sleep(seconds)
        self._proxy.bytes_per_s = None


def _stop(process: ServiceProcess, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


class Watch:
    """Counts what processes hold, every few seconds."""

    def __init__(self, console: Console, traffic: Traffic, faults: Faults, pids: Callable[[], dict[str, int]]) -> None:
        self.censuses: dict[str, list[Census]] = {}
        self.stopping = threading.Event()
        self._console = console
        self._traffic = traffic
        self._faults = faults
        self._pids = pids

    def run(self) -> None:
        """Until `stopping`."""
        began, told = time.monotonic(), 0.0
        while not self.stopping.wait(SAMPLE_EVERY_S):
            seconds = time.monotonic() - began
            taken = {name: take_census(pid, seconds) for name, pid in self._pids().items()}
            for name, census in taken.items():
                if census is not None:
                    self.censuses.setdefault(name, []).append(census)
            if seconds >= told + REPORT_EVERY_S:
                told = seconds
                self._report(seconds, taken)

    def _report(self, seconds: float, taken: dict[str, Census | None]) -> None:
        parts = [
            f"{name} {one.memory_mib:.0f} MiB, {one.fds} fds, {one.threads} threads, {one.segments} segments"
            for name, one in taken.items()
            if one is not None
        ]
        traffic = self._traffic
        done = f"{traffic.counts.total()} requests, {len(traffic.failures)} failed; faults: {self._faults.tell()}"
        self._console.print(f"{seconds / 60:5.1f} min: {done}; {'; '.join(parts)}", soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _running(work: Callable[[], None], stopping: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _expected(client: Client) -> dict[str, tuple[int, ...]]:
    """Greedy output of each prompt without drafts, of those in which no choice is within rounding."""
    expected = {}
    for prompt in PROMPTS:
        completion = client.complete(prompt, temperature=0, max_tokens=MAX_TOKENS, num_speculative_tokens=0, logprobs=2)
        if all(one.top[0][1] - one.top[1][1] > ROUNDING for one in completion.logprobs):
            expected[prompt] = completion.token_ids
    return expected


@click.command()
@click.option("--minutes", default=20.0, show_default=True, type=click.FloatRange(min=1.5))
@click.option("--seed", default=1, show_default=True, help="Of the faults and of the clients' choices.")
def main(minutes: float, seed: int) -> None:
    """Runs the soak and prints what grew."""
    console = Console(width=160)
    with contextlib.ExitStack() as close:
        logs = Path(close.enter_context(tempfile.TemporaryDirectory(prefix="draftwire-soak-")))
        models = DEMO / "head", DEMO / "target"
        # Of the third one the messages take the network, where the faults are, instead of shared memory.
        drafters = [
            Drafter(*models, logs / f"drafter{number}.log", "--carriers", carriers)
            for number, carriers in enumerate(("auto", "auto", "bytes"), 1)
        ]
        for drafter in drafters:
            close.callback(lambda drafter=drafter: drafter.kill())
        killed, living, distant = drafters
        proxy = close.enter_context(TcpProxy(distant.address))
        pool = [killed.address, living.address, proxy.address]
        # Drafts are asked for whether they pay or not: it is the traffic with drafters that is to be watched.
        options = ("--device", "cpu", "--no-adaptive-k", "--kv-cache-tokens", "16384")
        verifier = start_verifier(DEMO / "target", pool, *options, log_path=logs / "verifier.log")
        close.callback(verifier.kill)
        with Client(verifier.address) as client:
            wait_for_drafters(client)
            traffic = Traffic(verifier.address, _expected(client), random.Random(seed))
        faults = Faults(killed, [living, distant], proxy, random.Random(seed + 1))

        def pids() -> dict[str, int]:
            numbered = {f"drafter {number}": one.process.pid for number, one in enumerate(drafters, 1)}
            return {"verifier": verifier.pid, **numbered}

        watch = Watch(console, traffic, faults, pids)
        with _running(traffic.run, traffic.stopping), _running(watch.run, watch.stopping):
            ends = time.monotonic() + 60 * minutes
            while time.monotonic() < ends:
                faults.next()
        is_flat = _print_result(console, traffic, faults, watch)
    sys.exit(0 if is_flat and not traffic.failures else 1)


def _print_result(console: Console, traffic: Traffic, faults: Faults, watch: Watch) -> bool:
    console.print(f"requests: {dict(traffic.counts)}; failed or changed: {len(traffic.failures)}", highlight=False)
    for failure in traffic.failures[:10]:
        console.print(f"  {failure}", highlight=False)
    console.print(f"faults: {dict(faults.counts)}", highlight=False)
    console.print(f"accepted drafts per verify step, faults included: {traffic.accepted / traffic.verify_steps:.2f}")
    table = Table("process", "what", "after warm-up", "at the end", "flat")
    is_flat = True
    for name in ("verifier", "drafter 2", "drafter 3"):
        for verdict in judge(watch.censuses[name]):
            is_flat = is_flat and verdict.is_flat
            table.add_row(
                name, verdict.what, f"{verdict.early:.1f}", f"{verdict.late:.1f}", "yes" if verdict.is_flat else "NO"
            )
    console.print(table)
    return is_flat


if __name__ == "__main__":
    main()
