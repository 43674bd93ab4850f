"""Throughput with a distant drafter relative to throughput without drafts, simulated with a fake clock.

    make test-pacing

The rounds are like those of `draftwire_bench.far_drafter`. One verifier uses one link after another, each for three
rounds: a warm-up in which the verifier measures the link, a round without drafts, and a round with drafts. A round is
two turns; the requests of a turn arrive together. The times of steps, launches, messages and drafts were recorded on
GPUs. Pacing is the verifier's own code.

Prints the mean and lowest ratio of each place, and each single ratio below 0.93. The exit code is 1 if the mean of a
place is below 0.93, or the mean of all ratios is below 1.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import pytest
from drafting_scene import Clock
from paced_world import CONFIG, Costs, World, use_rows_of_8b
from rich.console import Console
from rich.table import Table

LEAST_RATIO, LEAST_MEAN = 0.93, 1.0
OUTPUT_LENGTH = 400
TURNS = 2


@dataclass(frozen=True)
class Host:
    """The costs of an 8B model on a host with two GPUs, and the round trips of its links."""

    costs: Costs
    trips_s: dict[float, float]  # round trip, including the work of both hosts, by the link's delay in ms
    is_slow_at_times: bool = False


# Seconds to send a feature row of 8 KiB at the rate that a connection reaches, by the link's rate in Gbit/s.
FEATURE_ROW_S = {1.0: 65.5e-6, 10.0: 12e-6, 25.0: 9e-6}
H100 = Host(
    Costs(
        step_s=6.1e-3,
        row_s=9.5e-6,
        launch_s=3e-3,
        send_s=2.5e-3,
        send_row_s=1e-6,
        draft_s=0.35e-3,
        backlog_s=2e-3,
        accepted=2,
    ),
    {0.2: 2.8e-3, 1.0: 4.2e-3, 5.0: 12.5e-3},
)
H200 = Host(
    replace(H100.costs, step_s=4.72e-3, launch_s=2.7e-3, send_s=2.2e-3, draft_s=0.3e-3, backlog_s=1.5e-3),
    {0.2: 2.6e-3, 1.0: 3.9e-3, 5.0: 12e-3},
)
HOSTS = {
    "H100": H100,
    "H100, stalls": replace(H100, costs=replace(H100.costs, stall_s=8e-3)),
    "H100, slow at times": replace(H100, is_slow_at_times=True),
    "H200": H200,
    "H200, slow at times": replace(H200, is_slow_at_times=True),
}
# A slow host: factor of its launch and send times, and the range of its slow seconds in every second turn.
SLOWER, SLOW_S = 1.8, (0.2, 0.6)
# (delay in ms, Gbit/s), in this order: the measurements of one link are wrong for the next.
PLACES = (
    (0.2, 1.0),
    (0.2, 25.0),
    (1.0, 1.0),
    (1.0, 25.0),
    (0.2, 1.0),
    (1.0, 10.0),
    (5.0, 10.0),
    (1.0, 1.0),
    (5.0, 1.0),
    (0.2, 10.0),
)


@dataclass(frozen=True)
class Case:
    """The host and the load of one simulated verifier."""

    host: str
    sequences: int
    prompt_length: int
    noise: float
    seed: int


@dataclass(frozen=True)
class Ratios:
    """Throughput of two rounds with drafts at one place, divided by the throughput without drafts."""

    first: float  # of the warm-up round, which the benchmark does not count
    counted: float


def ratios(case: Case) -> list[Ratios]:
    """Return the ratios for each of `PLACES`."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock.stand_in(patch)
        use_rows_of_8b(patch)
        host = HOSTS[case.host]
        costs = replace(host.costs, noise=case.noise)
        lengths: dict[str, Any] = {"prompt_length": case.prompt_length, "output_length": OUTPUT_LENGTH}
        world = World(clock, 0, costs, config=CONFIG, replaces=False, **lengths)
        world.draw.seed(case.seed)
        spells = random.Random(case.seed) if host.is_slow_at_times else None
        found = []
        for delay_ms, gbit_per_s in PLACES:
            costs.trip_s, costs.feature_row_s = host.trips_s[delay_ms], FEATURE_ROW_S[gbit_per_s]
            first, without, counted = (_rate(world, case.sequences, k, spells) for k in (4, 0, 4))
            found.append(Ratios(first / without, counted / without))
        return found


def _rate(world: World, sequences: int, k: int, spells: random.Random | None) -> float:
    """Run a round; return its tokens per second."""
    began, before = world.clock.now, world.tokens
    for turn in range(TURNS):
        for _ in range(sequences):
            world.arrive(k=k)
        if spells is not None and turn % 2:
            with _slow(world.costs):
                world.run(spells.uniform(*SLOW_S))
        world.run(100.0)
    return (world.tokens - before) / (world.clock.now - began)


@contextmanager
def _slow(costs: Costs) -> Iterator[None]:
    usual = costs.launch_s, costs.send_s, costs.send_row_s
    costs.launch_s, costs.send_s, costs.send_row_s = (SLOWER * seconds for seconds in usual)
    yield
    costs.launch_s, costs.send_s, costs.send_row_s = usual


@click.command()
@click.option("--hosts", default=";".join(HOSTS), show_default=True)
@click.option("--sequences", default=32, show_default=True, help="Requests that come at once.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--processes", default=2, show_default=True)
def main(hosts: str, sequences: int, seeds: int, processes: int) -> None:
    """Simulate each host with two prompt lengths, two noise levels and several seeds."""
    names = hosts.split(";")
    cases = [Case(*values) for values in itertools.product(names, [sequences], [64, 256], [0.05, 0.1], range(seeds))]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(cases, pool.map(ratios, cases), strict=True))
    console = Console(width=max(Console().width, 100))
    is_any_under = False
    for name in names:
        places = list(zip(*(of_case for case, of_case in found.items() if case.host == name), strict=True))
        console.print(_table(name, places))
        is_any_under |= any(statistics.mean(one.counted for one in place) < LEAST_RATIO for place in places)
    single = [(one, place, case) for case in cases for place, one in zip(PLACES, found[case], strict=True)]
    under = [values for values in single if values[0].counted < LEAST_RATIO]
    num_first = sum(one.first < LEAST_RATIO for one, *_ in single)
    console.print(f"under {LEAST_RATIO}: {len(under)} of {len(single)}, and {num_first} first rounds")
    for one, place, case in under:
        console.print(f"  {one.counted:.4f} {place} {case}")
    mean = statistics.mean(one.counted for one, *_ in single)
    console.print(f"mean of all: {mean:.3f}")
    sys.exit(is_any_under or mean < LEAST_MEAN)


def _table(host: str, places: Sequence[Sequence[Ratios]]) -> Table:
    table = Table(title=f"{host}: {len(places[0])} verifiers, throughput with drafts over that without")
    for column in ("delay, ms", "Gbit/s", "mean", "lowest", "lowest first round"):
        table.add_column(column, justify="right")
    for (delay_ms, gbit_per_s), found in zip(PLACES, places, strict=True):
        counted, first = [one.counted for one in found], [one.first for one in found]
        numbers = (f"{value:.3f}" for value in (statistics.mean(counted), min(counted), min(first)))
        table.add_row(f"{delay_ms:g}", f"{gbit_per_s:g}", *numbers)
    return table


if __name__ == "__main__":
    main()
