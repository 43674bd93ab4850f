"""An endless load of greedy and sampled requests with checks, and the measurement of faults under this load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from exact_law import LENGTH, Law, Sampling
from exact_services import Loop
from services import Continuation

from draftwire.client import AsyncClient, Client, Completion
from draftwire.contract.errors import DraftwireError
from draftwire.v1 import generate_pb2

# Number of concurrent sampled requests, in addition to one greedy request for each continuation.
SAMPLED_AT_ONCE = 6
# Pause of a client between its requests, because services start and stop at the same time.
PAUSE_S = 0.02
# Minimum number of sampled outputs whose distribution is tested: of all since the fault began. Outputs during the fault
# are also tested separately if there are as many.
ENOUGH_SAMPLES = 400
# Consecutive rounds within TOLERANCE of the undisturbed acceptance before a fault may begin. Other load on the CPU can
# delay drafts.
BASELINE_ROUNDS = 3
# Requirement: within RECOVERY_S after a fault's end, acceptance is within TOLERANCE of the undisturbed acceptance.
TOLERANCE = 0.05
RECOVERY_S = 10.0
# Consecutive rounds that must be within TOLERANCE; a single one may be chance.
RECOVERED_ROUNDS = 3
# Timeout of all waits.
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Round:
    """All greedy requests, sent at once."""

    began: float  # monotonic s
    accepted: int
    verify_steps: int

    @property
    def acceptance(self) -> float:
        """Return the accepted drafts per verify step: 0 without drafts, k if all are accepted."""
        return self.accepted / self.verify_steps


@dataclass
class Sample:
    """A sampled request; times are monotonic."""

    began: float
    ended: float = math.inf  # infinity while the request runs
    tokens: tuple[int, ...] = ()

    def overlaps(self, begin: float, end: float = math.inf) -> bool:
        """Return whether the request ran at any time from `begin` to `end`."""
        return self.began <= end and self.ended >= begin


@dataclass
class FaultRecord:
    """A row of the fault matrix."""

    fault: str
    requests: int = 0
    failures: int = 0
    sampled_during: int = 0  # sampled outputs of requests that ran during the fault
    before: float = 0.0  # accepted drafts per verify step
    during: float = 0.0
    after: float = 0.0
    recovery_s: float = 0.0  # from the fault's end to the begin of the first recovered round
    refutation: float = 0.0  # maximum of chi-square / threshold of the sampled outputs


@dataclass
class Load:
    """Clients that keep verifiers busy from `__enter__` to `__exit__`, without retries."""

    addresses: Sequence[str]  # of the verifiers, which share the requests evenly
    continuations: Sequence[Continuation]
    law: Law
    undisturbed: float  # acceptance of a round in which all drafts arrive
    rounds: list[Round] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_requests: int = 0

    def __enter__(self) -> Self:
        self._is_stopping = False
        self._loop = Loop()
        self._task = asyncio.run_coroutine_threadsafe(self._run(), self._loop.loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        try:
            self._task.result(PATIENCE_S)
        finally:
            self._loop.close()

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as close, asyncio.TaskGroup() as group:
            clients = [await close.enter_async_context(AsyncClient(address)) for address in self.addresses]
            group.create_task(self._run_greedy(clients))
            for _, client in zip(range(SAMPLED_AT_ONCE), itertools.cycle(clients), strict=False):
                group.create_task(self._run_sampled(client))

    async def _run_greedy(self, clients: Sequence[AsyncClient]) -> None:
        while not self._is_stopping:
            began = time.monotonic()
            pairs = zip(itertools.cycle(clients), self.continuations, strict=False)
            completions = await asyncio.gather(*(self._say(client, wanted) for client, wanted in pairs))
            statistics = [one.statistics for one in completions if one is not None]
            accepted = sum(sum(one.accepted) for one in statistics)
            self.rounds.append(Round(began, accepted, sum(one.verify_steps for one in statistics) or 1))
            await asyncio.sleep(PAUSE_S)

    async def _say(self, client: AsyncClient, wanted: Continuation) -> Completion | None:
        completion = await self._complete(client, wanted.prompt, temperature=0, max_tokens=len(wanted.tokens))
        if completion is not None and list(completion.token_ids) != wanted.tokens:
            self.failures.append(f"greedy output differs: {completion.token_ids} for {wanted}")
        return completion

    async def _run_sampled(self, client: AsyncClient) -> None:
        while not self._is_stopping:
            sample = Sample(time.monotonic())
            self.samples.append(sample)
            # No seed: with a seed, drafts without logits can change no token, so no fault could bias the outputs.
            options = {"temperature": 1.0, "max_tokens": LENGTH}
            completion = await self._complete(client, list(self.law.prompt), **options)
            if completion is not None:
                sample.tokens = completion.token_ids
                sample.ended = time.monotonic()
            await asyncio.sleep(PAUSE_S)

    async def _complete(self, client: AsyncClient, prompt: list[int], **options: int | float) -> Completion | None:
        self.num_requests += 1
        try:
            completion = await client.complete(prompt, **options)
        except DraftwireError as error:
            self.failures.append(str(error))
            return None
        if completion.statistics.output_tokens != len(completion.token_ids):
            self.failures.append(f"{completion.statistics.output_tokens} tokens counted, not {completion.token_ids}")
        return completion

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition` holds; fail if a request fails or PATIENCE_S is over."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self._task.done(), self._task.result()
            assert not self.failures, self.failures[:3]
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.02)

    def drafters(self) -> list[generate_pb2.DrafterStatus]:
        """Return the states of the drafters as the first verifier reports them."""
        with Client(self.addresses[0]) as client:
            return list(client.info().drafters)

    def wait_for_rounds(self, count: int) -> list[Round]:
        """Wait for `count` rounds that begin after this call, and return them."""
        now = time.monotonic()
        self.wait_for(lambda: len(self._since(now)) >= count, f"{count} rounds of greedy requests")
        return self._since(now)[:count]

    def _since(self, begin: float) -> list[Round]:
        return [one for one in list(self.rounds) if one.began >= begin]

    def measure(self) -> float:
        """Wait for BASELINE_ROUNDS consecutive undisturbed rounds that begin from now on; return their acceptance."""
        now = time.monotonic()
        wanted = (1 - TOLERANCE) * self.undisturbed
        what = (
            f"{BASELINE_ROUNDS} rounds in a row with the acceptance of {self.undisturbed:.2f} that drafts in time have"
        )
        self.wait_for(lambda: bool(first_good(self._since(now), wanted, BASELINE_ROUNDS)), what)
        return _mean_acceptance(first_good(self._since(now), wanted, BASELINE_ROUNDS))

    def wait_until_recovered(self, ended: float) -> Sequence[Round]:
        """Wait for the undisturbed acceptance after a fault that ended at the monotonic time `ended`.

        Return the first RECOVERED_ROUNDS consecutive rounds after the end that are within TOLERANCE. The first of them
        must begin within RECOVERY_S after the end; the duration of the other rounds depends on the CPU.
        """
        wanted = (1 - TOLERANCE) * self.undisturbed
        what = f"acceptance of {self.undisturbed:.2f} is back"
        self.wait_for(lambda: bool(first_good(self._since(ended), wanted, RECOVERED_ROUNDS)), what)
        recovered = first_good(self._since(ended), wanted, RECOVERED_ROUNDS)
        seen = [(round(one.began - ended, 1), round(one.acceptance, 2)) for one in self._since(ended)]
        assert recovered[0].began - ended <= RECOVERY_S, f"{what}, but not in time; (s, acceptance): {seen}"
        return recovered

    @contextlib.contextmanager
    def fault(
        self, name: str, *, during_below: float | None = None, during_above: float = 0.0
    ) -> Iterator[FaultRecord]:
        """Measure the body of the context as a fault; after the body, complete and check the record.

        Parameters
        ----------
        during_below
            The fault must reduce acceptance below this share of the acceptance before, which proves its effect.
        during_above
            Acceptance must stay above this share: a fault of other clients does not affect this load's drafts.
        """
        record = FaultRecord(name)
        record.before = self.measure()
        began, first = time.monotonic(), self.num_requests
        yield record
        ended = time.monotonic()
        recovered = self.wait_until_recovered(ended)
        self.wait_for(lambda: len(self._outputs(began)) >= ENOUGH_SAMPLES, "enough sampled outputs")
        self.wait_for(lambda: all(one.tokens for one in self._samples(began, ended)), "those of the fault are complete")
        record.recovery_s = recovered[0].began - ended
        record.after = _mean_acceptance(recovered)
        during = [one for one in self._since(began) if one.began < ended]
        record.during = _mean_acceptance(during) if during else record.before
        record.requests, record.failures = self.num_requests - first, len(self.failures)
        record.sampled_during = len(self._outputs(began, ended))
        record.refutation = self.refutation(began, ended)
        assert record.failures == 0, self.failures[:3]
        assert record.sampled_during >= SAMPLED_AT_ONCE, record
        assert record.refutation < 1, record
        if during_below is not None:
            assert record.during < during_below * record.before, record
        assert record.during >= during_above * record.before, record

    def refutation(self, began: float, ended: float) -> float:
        """Return the maximum of chi-square / threshold: of all outputs since a fault began, and of those during it."""
        during = self._outputs(began, ended)
        tested = [self._outputs(began), *([during] if len(during) >= ENOUGH_SAMPLES else [])]
        return max(self.law.refutation(outputs, Sampling()) for outputs in tested)

    def _samples(self, begin: float, end: float = math.inf) -> list[Sample]:
        return [one for one in list(self.samples) if one.overlaps(begin, end)]

    def _outputs(self, begin: float, end: float = math.inf) -> list[tuple[int, ...]]:
        """Return the complete outputs of the sampled requests that ran between these times."""
        return [one.tokens for one in self._samples(begin, end) if one.tokens]


def first_good(rounds: Sequence[Round], wanted: float, count: int) -> Sequence[Round]:
    """Return the first `count` consecutive rounds with at least the acceptance `wanted`, or an empty list."""
    for first in range(len(rounds) - count + 1):
        some = rounds[first : first + count]
        if all(one.acceptance >= wanted for one in some):
            return some
    return []


def _mean_acceptance(rounds: Sequence[Round]) -> float:
    return sum(one.accepted for one in rounds) / sum(one.verify_steps for one in rounds)
