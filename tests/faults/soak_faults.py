"""The soak's faults, chosen by a seeded generator."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draft_relay import DraftRelay, corrupt_tokens
from drafters import Drafter
from streaming_client import kill_client_in_mid_stream
from tcp_proxy import TcpProxy

from draftwire.client import Client
from draftwire.contract.errors import DraftwireError
from draftwire_bench.processes import ServiceProcess

# Ranges of the seconds between two faults and of the seconds that a fault lasts.
BETWEEN_S = (2.0, 10.0)
LASTS_S = (0.5, 12.0)
# Streams of the client, or to the verifier, that is killed.
NUM_STREAMS = 4
MAX_TOKENS = 48


@dataclass
class Faults:
    """Random faults, one after another."""

    draw: random.Random
    vocab_size: int
    killed: Drafter  # killed and restarted by faults
    head: Path  # of `killed`
    other_head: Path  # for the same target
    starving: Drafter  # runs starving_drafter.py; never killed
    distant: Drafter  # behind the relay, which is behind the proxy; never killed
    relay: DraftRelay
    proxy: TcpProxy
    verifier: ServiceProcess
    other: ServiceProcess  # another verifier with the same drafters
    start_other: Callable[[], ServiceProcess]
    expected: Mapping[str, tuple[int, ...]]  # greedy output of MAX_TOKENS tokens, by prompt
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ended: float = field(default_factory=time.monotonic)  # end of the last fault; infinity during a fault
    _unreported: list[str] = field(default_factory=list)

    def report_new(self) -> str:
        """Return the names and durations of the faults since the last call, as text."""
        names, self._unreported = self._unreported, []
        return ", ".join(names) or "none"

    def next(self) -> None:
        """Wait, then run one random fault from begin to end."""
        time.sleep(self.draw.uniform(*BETWEEN_S))
        fault = self.draw.choice(
            [
                *(self.kill, self.change_head, self.stop_one, self.stop_other, self.starve),
                *(self.corrupt, self.cut, self.delay, self.silence, self.narrow),
                *(self.kill_client, self.kill_verifier),
            ]
        )
        self.counts[fault.__name__] += 1
        seconds = self.draw.uniform(*LASTS_S)
        self._unreported.append(f"{fault.__name__} {seconds:.1f} s")
        self.ended = float("inf")
        fault(seconds)
        self.ended = time.monotonic()

    def kill(self, seconds: float) -> None:
        """Kill a drafter with SIGKILL and restart it later."""
        self.killed.kill()
        time.sleep(seconds)
        self.killed.start()

    def change_head(self, seconds: float) -> None:
        """Kill a drafter and restart it with another head; later restart it with its first head."""
        self.killed.kill()
        self.killed.start(self.other_head)
        time.sleep(seconds)
        self.killed.kill()
        self.killed.start(self.head)

    def stop_one(self, seconds: float) -> None:
        """Pause the drafter that other faults kill, with SIGSTOP and SIGCONT."""
        _stop(self.killed.process, seconds)

    def stop_other(self, seconds: float) -> None:
        """Pause a drafter that is never killed, with SIGSTOP and SIGCONT."""
        _stop(self.draw.choice([self.starving, self.distant]).process, seconds)

    def starve(self, seconds: float) -> None:
        """Let the allocations of every 20th batch of a drafter fail."""
        self.starving.process.send_signal(signal.SIGUSR1)
        time.sleep(seconds)
        self.starving.process.send_signal(signal.SIGUSR2)

    def corrupt(self, seconds: float) -> None:
        """Replace the tokens of half of the answers."""
        self.relay.alter = corrupt_tokens(self.vocab_size)
        time.sleep(seconds)
        self.relay.alter = None

    def cut(self, seconds: float) -> None:
        """Reset the connection in the middle of a message of a random direction."""
        self.proxy.cut(from_service=self.draw.random() < 0.5)
        time.sleep(seconds)

    def delay(self, seconds: float) -> None:
        """Delay the drafter's bytes."""
        self.proxy.delay_s = self.draw.uniform(0.05, 1.0)
        time.sleep(seconds)
        self.proxy.delay_s = 0.0

    def silence(self, seconds: float) -> None:
        """Forward no bytes between verifier and drafter."""
        self.proxy.is_silent = True
        time.sleep(seconds)
        self.proxy.is_silent = False

    def narrow(self, seconds: float) -> None:
        """Limit the throughput of the connection to between 10 kB/s and 1 MB/s."""
        self.proxy.bytes_per_s = self.draw.uniform(1e4, 1e6)
        time.sleep(seconds)
        self.proxy.bytes_per_s = None

    def kill_client(self, _seconds: float) -> None:
        """Kill a client process with SIGKILL while the verifier streams to it."""
        kill_client_in_mid_stream(self.verifier.address, NUM_STREAMS)

    def kill_verifier(self, seconds: float) -> None:
        """Check a greedy output of the other verifier, kill it with SIGKILL while it streams, and restart it later."""
        prompt = self.draw.choice(list(self.expected))
        try:
            with Client(self.other.address) as client:
                completion = client.complete(prompt, temperature=0, max_tokens=MAX_TOKENS)
                if completion.token_ids != self.expected[prompt]:
                    self.failures.append(f"greedy output of the other verifier changed: {prompt!r}")
                streams = [client.generate(prompt, max_tokens=256, ignore_eos=True) for _ in range(NUM_STREAMS)]
                for stream in streams:
                    next(stream)
                self.other.kill()
        except DraftwireError as error:
            self.failures.append(f"the other verifier: {error}")
            self.other.kill()
        time.sleep(seconds)
        self.other = self.start_other()


def _stop(process: ServiceProcess, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)
