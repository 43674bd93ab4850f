"""Requests without an end, greedy and sampled, every one of them checked; and faults measured under them."""

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

# Sampled requests at any time, beside one greedy request for each continuation.
SAMPLED_AT_ONCE = 6
# Pause of a client between its requests: the services start and stop beside it.
PAUSE_S = 0.02
# Sampled outputs whose law is tested: of all since the fault began, and of those under way during it where it lasts
# long enough for so many.
ENOUGH_SAMPLES = 400
# Rounds in a row within TOLERANCE of the undisturbed acceptance, without which no fault begins: a busy machine holds up
# drafts.
BASELINE_ROUNDS = 3
# The project's plan: acceptance is back within this share of what it was, within so long of the fault's end.
TOLERANCE = 0.05
RECOVERY_S = 10.0
# Rounds in a row that are within it: one alone may be luck.
RECOVERED_ROUNDS = 3
# How long a test waits for what must come.
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Round:
    """All greedy requests, sent at once."""

    began: float  # monotonic s
    accepted: int
    verify_steps: int

    @property
    def acceptance(self) -> float:
        """Accepted drafts per verify step: 0 without drafts, k when all are accepted."""
        return self.accepted / self.verify_steps


@dataclass
class Sample:
    """A sampled request; times are monotonic."""

    began: float
    ended: float = math.inf  # while it runs
    tokens: tuple[int, ...] = ()

    def overlaps(self, begin: float, end: float = math.inf) -> bool:
        """Whether it was under way at any time from `begin` to `end`."""
        return self.began <= end and self.ended >= begin


@dataclass
class FaultRecord:
    """A row of the fault matrix."""

    fault: str
    requests: int = 0
    failures: int = 0
    sampled_during: int = 0  # sampled outputs that were under way during the fault
    before: float = 0.0  # accepted drafts per verify step
    during: float = 0.0
    after: float = 0.0
    recovery_s: float = 0.0  # from the fault's end to the begin of the first round that is good, as are those after it
    refutation: float = 0.0  # largest chi-square of sampled outputs over its threshold


@dataclass
class Load:
    """Keeps verifiers busy from `__enter__` to `__exit__`; clients never try again."""

    addresses: Sequence[str]  # of the verifiers, which share the requests evenly
    continuations: Sequence[Continuation]
    law: Law
    undisturbed: float  # acceptance of a round all of whose drafts arrive
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
            # No seed: the one-hot test is the law that a fault could bias.
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
            self.failures.append(f"{completion.statistics.output_tokens} tokens were told, not {completion.token_ids}")
        return completion

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until `condition` holds, which must come while no request fails."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self._task.done(), self._task.result()
            assert not self.failures, self.failures[:3]
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.02)

    def drafters(self) -> list[generate_pb2.DrafterStatus]:
        """How the first verifier sees its drafters."""
        with Client(self.addresses[0]) as client:
            return list(client.info().drafters)

    def wait_for_rounds(self, count: int) -> list[Round]:
        """Waits for rounds that begin after now."""
        now = time.monotonic()
        self.wait_for(lambda: len(self._since(now)) >= count, f"{count} rounds of greedy requests")
        return self._since(now)[:count]

    def _since(self, begin: float) -> list[Round]:
        return [one for one in list(self.rounds) if one.began >= begin]

    def measure(self) -> float:
        """Acceptance of the first BASELINE_ROUNDS in a row, begun after now, that nothing disturbs."""
        now = time.monotonic()
        wanted = (1 - TOLERANCE) * self.undisturbed
        what = (
            f"{BASELINE_ROUNDS} rounds in a row with the acceptance of {self.undisturbed:.2f} that drafts in time have"
        )
        self.wait_for(lambda: bool(first_good(self._since(now), wanted, BASELINE_ROUNDS)), what)
        return _mean_acceptance(first_good(self._since(now), wanted, BASELINE_ROUNDS))

    def wait_until_recovered(self, ended: float) -> Sequence[Round]:
        """Waits for the undisturbed acceptance after a fault that ended at the monotonic time `ended`.

        It is back with the first round, begun after the end, that is within TOLERANCE of it as a whole and followed by
        others that are, RECOVERED_ROUNDS in a row. That round must begin within RECOVERY_S of the end; how long the
        others take is the machine's.
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
        """The body is the fault, from its begin to its end. Its record is complete, and checked, after it.

        Parameters
        ----------
        during_below
            Share of the acceptance before that the fault must bring it below: proof that it was one.
        during_above
            Share that the fault must leave: that of others does not touch this load's drafts.
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
        """Largest chi-square over its threshold: of all sampled outputs since a fault began, and of those during it."""
        during = self._outputs(began, ended)
        tested = [self._outputs(began), *([during] if len(during) >= ENOUGH_SAMPLES else [])]
        return max(self.law.refutation(outputs, Sampling()) for outputs in tested)

    def _samples(self, begin: float, end: float = math.inf) -> list[Sample]:
        return [one for one in list(self.samples) if one.overlaps(begin, end)]

    def _outputs(self, begin: float, end: float = math.inf) -> list[tuple[int, ...]]:
        """Of the sampled requests that were under way between those times, those that are complete."""
        return [one.tokens for one in self._samples(begin, end) if one.tokens]


def first_good(rounds: Sequence[Round], wanted: float, count: int) -> Sequence[Round]:
    """The first `count` in a row with that acceptance or more; none while there are not so many."""
    for first in range(len(rounds) - count + 1):
        some = rounds[first : first + count]
        if all(one.acceptance >= wanted for one in some):
            return some
    return []


def _mean_acceptance(rounds: Sequence[Round]) -> float:
    return sum(one.accepted for one in rounds) / sum(one.verify_steps for one in rounds)
