"""Both services under mixed load with random faults; checks outputs and growth.

    python tests/faults/soak.py --minutes 20 --seed 1

Two verifiers and three drafters of the demo pair run on the CPU. The first verifier has the load and is never killed.
Faults kill and restart the second verifier and the first drafter. The second drafter shares memory with the verifiers,
and its allocations fail at times. The third drafter has faults in its answers and its network. The growth of all
processes that are never killed is judged. The exit code is 1 if a request failed, a greedy output changed, sampled
outputs refuted their distribution, or a process grew.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from addresses import free_address
from census import MIB, Census, judge, take_census
from demo_law import ROUNDING, DemoLaw, laws_after
from draft_relay import DraftRelay
from drafters import Drafter
from freed_memory import freed_memory_returned
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from soak_faults import MAX_TOKENS, Faults
from tcp_proxy import TcpProxy

from draftwire.client import AsyncClient, Client
from draftwire.contract.errors import DraftwireError
from draftwire_bench.demo_prompts import PROMPTS
from draftwire_bench.processes import DRAFTWIRE, ServiceProcess, start_verifier
from draftwire_bench.services import wait_for_drafters

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
STARVING = (sys.executable, str(Path(__file__).parent / "starving_drafter.py"))
CACHE_TOKENS, FILLING_TOKENS = 16384, 512
CLIENTS = 6
# Prompts after which the target is uncertain about each token.
LAW_PROMPTS = (PROMPTS[3][:20], PROMPTS[4][:20])
# Minimum number of outputs of each prompt per minute; test_faults_demo_law.py shows what 20 minutes of them refute.
LAW_SAMPLES_A_MINUTE = 15
SAMPLE_EVERY_S = 5.0
REPORT_EVERY_S = 60.0
# Pause of the faults after each quarter of the run, in which everything is restored and counted.
PAUSE_S = 30.0


@dataclass
class Traffic:
    """Clients without retries, each of which sends one request of a random kind after another."""

    address: str
    expected: dict[str, tuple[int, ...]]  # greedy output by prompt
    laws: list[DemoLaw]
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    outputs: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))  # by index into `laws`
    accepted: int = 0
    verify_steps: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send requests until `stopping` is set."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with AsyncClient(self.address) as client, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(client))

    async def _client(self, client: AsyncClient) -> None:
        ways = [self._greedy, self._sampled, self._lawful, self._cancelled, self._slow]
        while not self.stopping.is_set():
            (way,) = self.draw.choices(ways, [5, 4, 16, 1, 1])
            kind = way.__name__.removeprefix("_")
            self.counts[kind] += 1
            try:
                await way(client)
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
        options = {
            "temperature": self.draw.choice([0.5, 1.0]),
            "top_p": self.draw.choice([0.9, 1.0]),
            "repetition_penalty": self.draw.choice([1.0, 1.2]),
            "frequency_penalty": self.draw.choice([0.0, 0.5]),
            "logprobs": self.draw.choice([None, 0, 5]),
            "num_speculative_tokens": self.draw.choice([None, 0]),
        }
        prompt = self.draw.choice(PROMPTS)[: self.draw.randint(4, 80)]
        completion = await client.complete(prompt, max_tokens=length, ignore_eos=True, **options)
        if len(completion.token_ids) != length:
            self.failures.append(f"{len(completion.token_ids)} tokens instead of {length}")
        if options["logprobs"] is not None and len(completion.logprobs) != length:
            self.failures.append(f"log probabilities of {len(completion.logprobs)} of {length} tokens")

    async def _lawful(self, client: AsyncClient) -> None:
        """Request a sampled output so short that its distribution can be tested."""
        number = self.draw.randrange(len(self.laws))
        law = self.laws[number]
        completion = await client.complete(law.prompt, **law.options())
        self.outputs[number].append(completion.token_ids)

    def test_laws(self, least: int) -> list[float]:
        """Return chi-square / threshold of each law. Above 1, or with fewer than `least` outputs, it is a failure."""
        refutations = []
        for number, law in enumerate(self.laws):
            refutations.append(law.refutation(self.outputs[number]))
            if len(self.outputs[number]) < least or refutations[-1] > 1:
                what = f"{len(self.outputs[number])} sampled outputs have {refutations[-1]:.2f} of the threshold"
                self.failures.append(f"{what}, at least {least} below 1 are needed")
        return refutations

    async def _cancelled(self, client: AsyncClient) -> None:
        async with client.generate(self.draw.choice(PROMPTS), max_tokens=256) as stream:
            async for _ in stream:
                if self.draw.random() < 0.1:
                    break

    async def _slow(self, client: AsyncClient) -> None:
        async with client.generate(self.draw.choice(PROMPTS), max_tokens=MAX_TOKENS) as stream:
            async for _ in stream:
                await asyncio.sleep(0.1)


class Watch:
    """Periodic counts of the memory, file descriptors and threads of processes."""

    def __init__(self, console: Console, traffic: Traffic, faults: Faults, pids: Callable[[], dict[str, int]]) -> None:
        self.censuses: dict[str, list[Census]] = {}
        self.stopping = threading.Event()
        self._console = console
        self._traffic = traffic
        self._faults = faults
        self._pids = pids

    def run(self) -> None:
        """Take censuses until `stopping` is set."""
        began, reported = time.monotonic(), 0.0
        while not self.stopping.wait(SAMPLE_EVERY_S):
            seconds = time.monotonic() - began
            calm_s = max(0.0, time.monotonic() - self._faults.ended)
            taken = {name: take_census(pid, seconds, calm_s) for name, pid in self._pids().items()}
            for name, census in taken.items():
                if census is not None:
                    self.censuses.setdefault(name, []).append(census)
            if seconds >= reported + REPORT_EVERY_S:
                reported = seconds
                self._report(seconds, taken)

    def _report(self, seconds: float, taken: dict[str, Census | None]) -> None:
        parts = [
            f"{name} {one.memory_mib:.0f} MiB, {one.fds} fds, {one.threads} threads, {one.segments} segments"
            for name, one in taken.items()
            if one is not None
        ]
        traffic = self._traffic
        done = f"{traffic.counts.total()} requests, {len(traffic.failures)} failed; faults: {self._faults.report_new()}"
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
    """Return the greedy output of each prompt without drafts, except of prompts with a choice within rounding."""
    expected = {}
    for prompt in PROMPTS:
        completion = client.complete(prompt, temperature=0, max_tokens=MAX_TOKENS, num_speculative_tokens=0, logprobs=2)
        if all(one.top[0][1] - one.top[1][1] > ROUNDING for one in completion.logprobs):
            expected[prompt] = completion.token_ids
    return expected


def _other_head(directory: Path) -> Path:
    """Write the demo's head with slightly different weights; return its directory."""
    shutil.copytree(DEMO / "eagle3", directory)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight * (1 + 0.01 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        if weight.is_floating_point()
        else weight
        for name, weight in load_file(directory / "model.safetensors").items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory


def _start_drafters(logs: Path, close: contextlib.ExitStack) -> list[Drafter]:
    # The third drafter's messages use the network, where the faults are, instead of shared memory.
    kinds = (("auto", DRAFTWIRE), ("auto", STARVING), ("bytes", DRAFTWIRE))
    drafters = []
    for number, (carriers, program) in enumerate(kinds, 1):
        log = logs / f"drafter{number}.log"
        drafter = Drafter(DEMO / "eagle3", DEMO / "target", log, "--carriers", carriers, program=program)
        close.callback(drafter.kill)
        drafters.append(drafter)
    return drafters


def _play(faults: Faults, minutes: float) -> None:
    """Run faults, with a pause after each quarter of the run."""
    began = time.monotonic()
    for quarter in range(1, 5):
        # The last pause ends with the run; each other pause begins with the next quarter.
        ends = began + 15 * minutes * quarter - (PAUSE_S if quarter == 4 else 0.0)
        while time.monotonic() < ends:
            faults.next()
        time.sleep(PAUSE_S)


@click.command()
@click.option("--minutes", default=20.0, show_default=True, type=click.FloatRange(min=5))
@click.option("--seed", default=1, show_default=True, help="Of the faults and of the clients' choices.")
def main(minutes: float, seed: int) -> None:
    """Run the soak and print what grew."""
    console = Console(width=160)
    with contextlib.ExitStack() as close:
        close.enter_context(freed_memory_returned())
        logs = Path(close.enter_context(tempfile.TemporaryDirectory(prefix="draftwire-soak-")))
        killed, starving, distant = drafters = _start_drafters(logs, close)
        relay = close.enter_context(DraftRelay(distant.address))
        proxy = close.enter_context(TcpProxy(relay.address))
        pool = [killed.address, starving.address, proxy.address]
        # Drafts are requested even if they do not pay off, because the traffic with drafters is under test. Steps are
        # scheduled asynchronously, as on a GPU.
        options = ("--device", "cpu", "--no-adaptive-k", "--kv-cache-tokens", str(CACHE_TOKENS), "--async-scheduling")
        verifier = start_verifier(DEMO / "target", pool, *options, log_path=logs / "verifier.log")
        close.callback(verifier.kill)
        other_options = (*options, "--listen", free_address())

        def start_other() -> ServiceProcess:
            return start_verifier(DEMO / "target", pool, *other_options, log_path=logs / "other.log")

        with Client(verifier.address) as client:
            wait_for_drafters(client)
            expected = _expected(client)
            vocab_size = client.info().vocab_size
            _fill_cache(client, vocab_size)
        traffic = Traffic(verifier.address, expected, laws_after(LAW_PROMPTS, DEMO / "target"), random.Random(seed))
        faults = Faults(
            draw=random.Random(seed + 1),
            vocab_size=vocab_size,
            killed=killed,
            head=DEMO / "eagle3",
            other_head=_other_head(logs / "head"),
            starving=starving,
            distant=distant,
            relay=relay,
            proxy=proxy,
            verifier=verifier,
            other=start_other(),
            start_other=start_other,
            expected=expected,
        )
        close.callback(lambda: faults.other.kill())

        def pids() -> dict[str, int]:
            numbered = {f"drafter {number}": one.process.pid for number, one in enumerate(drafters, 1)}
            return {"verifier": verifier.pid, **numbered}

        watch = Watch(console, traffic, faults, pids)
        with _running(traffic.run, traffic.stopping), _running(watch.run, watch.stopping):
            _play(faults, minutes)
        with Client(verifier.address) as client:
            info = client.info()
        row_bytes = max(drafter.feature_row_bytes for drafter in info.drafters)
        leak = f"a feature row ({row_bytes} bytes) left behind by each: {info.counters.steps * row_bytes / MIB:.1f} MiB"
        console.print(f"steps of the verifier: {info.counters.steps}; {leak}", highlight=False)
        is_flat = _print_result(console, traffic, faults, watch, minutes)
    sys.exit(0 if is_flat and not traffic.failures else 1)


def _fill_cache(client: Client, vocab_size: int) -> None:
    """Write the verifier's whole cache once: the system allocates a page at its first write, which is no leak."""
    draw = random.Random(0)
    for _ in range(1 + CACHE_TOKENS // FILLING_TOKENS):
        client.complete([draw.randrange(vocab_size) for _ in range(FILLING_TOKENS)], max_tokens=1)


def _print_result(console: Console, traffic: Traffic, faults: Faults, watch: Watch, minutes: float) -> bool:
    refutations = traffic.test_laws(round(LAW_SAMPLES_A_MINUTE * minutes))
    traffic.failures += faults.failures
    console.print(f"requests: {dict(traffic.counts)}; failed or changed: {len(traffic.failures)}", highlight=False)
    for failure in traffic.failures[:10]:
        console.print(f"  {failure}", highlight=False)
    console.print(f"faults: {dict(faults.counts)}", highlight=False)
    console.print(f"accepted drafts per verify step, faults included: {traffic.accepted / traffic.verify_steps:.2f}")
    numbers = ", ".join(f"{refutation:.2f}" for refutation in refutations)
    console.print(f"chi2 of short sampled outputs over its threshold, by prompt: {numbers}", highlight=False)
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
