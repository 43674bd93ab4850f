"""Pacing of near and far drafters and of slow hosts, with simulated steps and drafts on a fake clock."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import drafting_scene
import pytest
from covering import covering
from drafting_scene import Clock, K, Scene
from far_places import LEAST_MEAN, LEAST_RATIO, Case, ratios
from paced_world import CONFIG, KNOWN_LOSS, Costs, World, adaptive, pace_of, use_rows_of_8b
from wave_world import NUM_DRAFTS, GpuCosts, WaveWorld

from draftwire.v1 import generate_pb2
from verifier_service.drafters.stream import Disconnected


def test_sequences_of_a_near_drafter_share_every_step(clock):
    world = World(clock, 8, Costs(trip_s=1e-3))
    world.run(0.6)
    world.step_sizes.clear()
    world.run(0.2)
    assert set(world.step_sizes) == {8}


def test_a_held_step_ends_its_wait_at_the_draft_deadline(clock):
    world = World(clock, 8, Costs(trip_s=1e-3), deadline_s=2.5e-3)
    world.run(0.3)
    one, *others = world.scene.requests
    world.drafter.costs.trip_s = 1.0  # no more answers arrive
    for request in world.scene.requests:
        world.scene.verify(request, 9)
    world.scene.flush()
    sent = clock.now
    one.drafts, world.drafting.placement.bindings[one].wait_until = None, None
    assert world.drafting.wait_policy.is_held(world.scene.requests, may_admit=False)
    assert clock.now < world.drafting.next_deadline() <= sent + 2.5e-3
    clock.now = sent + 2.5e-3
    assert not world.drafting.wait_policy.is_held(world.scene.requests, may_admit=False)
    assert all(world.drafting.wait_policy.is_ready(other) for other in others)


@pytest.mark.parametrize(("sequences", "deadline_s"), [(16, None), (64, None), (32, 0.5)])
def test_new_sequences_do_not_split_the_others(clock, monkeypatch, sequences, deadline_s):
    """Drafts of new sequences arrive last, because their prompts are read first; they miss at most one step."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(draft_s=0.4e-3, backlog_s=3e-3, noise=0.1)
    world = World(clock, sequences, costs, config=CONFIG, deadline_s=deadline_s)
    world.run(1.0)
    world.step_sizes.clear()
    rate = world.run(3.0)
    assert statistics.mean(world.step_sizes) > 0.95 * sequences
    latency_s = K * costs.draft_s + costs.trip_s + 3.05 * sequences * costs.feature_row_s
    step_s = costs.step_s + 5 * sequences * costs.row_s
    assert rate > 0.9 * 3.05 * sequences / (step_s + latency_s) / (1 + costs.noise)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("trip_s", [0.2e-3, 1e-3])
def test_sequences_of_two_near_drafters_share_steps(clock, trip_s, seed):
    costs = Costs(draft_s=0.3e-3, noise=0.05)
    world = World(clock, 16, costs, second=replace(costs, trip_s=trip_s), config=CONFIG, deadline_s=None)
    world.draw.seed(seed)
    world.run(1.0)
    world.step_sizes.clear()
    rate = world.run(2.0)
    assert statistics.mean(world.step_sizes) > 15
    assert rate > 1.7 * world.rate_without()


@pytest.mark.parametrize("trip_s", [0.2e-3, 3e-3, 12e-3])
def test_no_sequence_is_left_out_for_long(clock, trip_s):
    world = World(clock, 16, Costs(trip_s=trip_s))
    world.run(0.3)
    before = {request: len(request.tokens) for request in world.scene.requests}
    world.run(0.1)
    assert all(len(request.tokens) > length for request, length in before.items())


@pytest.mark.parametrize("sequences", [1, 8, 32, 64])
def test_a_near_drafter_is_asked_for_all_drafts(clock, sequences):
    world = adaptive(clock, sequences, Costs())
    assert world.run(1.0) > 1.4 * world.rate_without()
    assert world.drafted.count(4) > 0.8 * len(world.drafted)


def test_the_status_of_a_drafter_says_what_was_measured(clock):
    world = adaptive(clock, 8, Costs())
    status = generate_pb2.DrafterStatus(address="drafter:1")
    world.drafting.describe(status)
    assert not status.HasField("plan")  # nothing is measured yet
    world.run(2.0)
    world.drafting.describe(status)
    assert len(status.plan.tokens_per_s) == 5
    assert status.plan.expected_gain == pytest.approx(world.run(2.0) / world.rate_without(), rel=0.15)
    assert status.plan.answer_s == pytest.approx(4 * world.costs.draft_s + world.costs.trip_s, rel=0.3)
    world.drafting.handle(Disconnected(world.stream))
    world.drafting.describe(status)
    assert not status.HasField("plan")  # nothing is requested from a lost drafter


def test_drafts_are_not_waited_for_longer_than_they_gain(clock):
    """A drafter that stops answering is late after the time of K steps, long before the deadline."""
    world = adaptive(clock, 8, Costs())
    world.run(0.5)
    world.costs.trip_s = 1.0
    world.step_sizes.clear()
    world.run(0.1)
    assert len(world.step_sizes) > 0.6 * 0.1 / 4.9e-3


PROMPT_LENGTHS = {"H100, slow at times": 64, "H100, stalls": 256, "H200": 256}


@pytest.mark.parametrize("host", PROMPT_LENGTHS)
def test_no_place_is_much_slower_than_without_drafts(host):
    found = ratios(Case(host, 32, PROMPT_LENGTHS[host], 0.05, 0))
    assert min(one.counted for one in found) > LEAST_RATIO
    assert statistics.mean(one.counted for one in found) >= LEAST_MEAN


SYNTHETIC = {**CONFIG, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}


@pytest.mark.parametrize(
    ("config", "deadline_s", "adaptive_k", "is_adaptive"),
    [
        (CONFIG, 0.5, None, True),
        (CONFIG, None, None, False),  # measurements have no deadline
        (CONFIG, 0.5, False, False),
        (SYNTHETIC, 0.5, None, False),
        (SYNTHETIC, 0.5, True, True),
    ],
)
def test_the_number_of_drafts_adapts_by_default_or_if_asked_for(config, deadline_s, adaptive_k, is_adaptive):
    scene = Scene(config, deadline_s, adaptive_k=adaptive_k)
    scene.connect()
    assert pace_of(scene.drafting).is_adaptive == is_adaptive


OUTPUT_LENGTH = 400
# Two H100s; the host takes 3.5 ms to launch a step while another step runs.
BY_BYTES = {"step_s": 6.2e-3, "row_s": 9e-6, "draft_s": 0.25e-3, "acceptance": 0.7, "backlog_s": 1.8e-3, "noise": 0.05}
# Two H100s; the host takes up to 3.5 ms to launch a step and up to 37 us to send a row of features.
SLOW_HOST = {"step_s": 6.2e-3, "row_s": 9e-6, "draft_s": 0.3e-3, "backlog_s": 2.5e-3}


class Bursts:
    """A verifier that gets bursts of 32 simultaneous requests, with features of the 8B shape."""

    def __init__(
        self,
        clock: Clock,
        monkeypatch: pytest.MonkeyPatch,
        costs: Costs,
        *,
        k: int = 4,
        prompt_length: int = 256,
        seed: int = 0,
    ) -> None:
        use_rows_of_8b(monkeypatch)
        lengths: dict[str, Any] = {"prompt_length": prompt_length, "output_length": OUTPUT_LENGTH}
        self.world = World(clock, 0, costs, config=CONFIG, k=k, replaces=False, **lengths)
        self.world.draw.seed(seed)
        self.rate_without = 0.0

    def run(self, count: int = 1) -> float:
        """Return the output tokens per second over `count` bursts of requests."""
        began, before = self.world.clock.now, self.world.tokens
        for _ in range(count):
            for _ in range(32):
                self.world.arrive()
            self.rate_without = self.world.rate_without()
            self.world.run(100.0)
        return (self.world.tokens - before) / (self.world.clock.now - began)


@pytest.mark.parametrize("trip_s", [2.5e-3, 4e-3])
@pytest.mark.parametrize(
    ("feature_row_s", "send_row_s", "gain"),
    [(65e-6, 37e-6, 0.93), pytest.param(20e-6, 16e-6, 1.0, marks=KNOWN_LOSS), (8e-6, 3e-6, 1.1)],
)
def test_simultaneous_requests_lose_little_by_sending_their_rows(
    clock, monkeypatch, trip_s, feature_row_s, send_row_s, gain
):
    """Sent rows delay the next steps while sequences catch up."""
    sending = {"trip_s": trip_s, "feature_row_s": feature_row_s, "send_row_s": send_row_s, "launch_s": 3.5e-3}
    bursts = Bursts(clock, monkeypatch, Costs(**BY_BYTES, **sending))
    bursts.run()  # measures the link
    assert bursts.run(3) > gain * bursts.rate_without


# Pairwise coverage of 18 combinations.
@pytest.mark.parametrize(
    ("trip_s", "host", "seed"),
    covering([2.4e-3, 3.9e-3, 5.5e-3], [(2e-3, 0.03), (3.5e-3, 0.03), (3.5e-3, 0.1)], range(2)),
)
def test_simultaneous_requests_lose_little_on_slow_host_and_link(clock, monkeypatch, trip_s, host, seed):
    """The throughput is over all bursts, because single bursts vary."""
    launch_s, noise = host
    sending = {"trip_s": trip_s, "feature_row_s": 65e-6, "send_row_s": 37e-6, "launch_s": launch_s}
    bursts = Bursts(clock, monkeypatch, Costs(**SLOW_HOST, **sending, noise=noise, accepted=2), seed=seed)
    assert bursts.run(6) > 0.93 * bursts.rate_without


@pytest.mark.parametrize(
    ("sequences", "trip_s", "feature_row_s", "send_row_s", "launch_s", "gain"),
    [
        (64, 2.4e-3, 65e-6, 37e-6, 3.5e-3, 0.93),  # drafts do not pay off
        (64, 5.0e-3, 65e-6, 10e-6, 1.0e-3, 0.93),
        pytest.param(8, 2.4e-3, 65e-6, 37e-6, 3.5e-3, 1.15, marks=KNOWN_LOSS),
        (8, 2.4e-3, 20e-6, 16e-6, 3.5e-3, 1.4),
    ],
)
def test_successive_requests_lose_nothing_on_slow_host_and_link(
    clock, monkeypatch, sequences, trip_s, feature_row_s, send_row_s, launch_s, gain
):
    """A drafter that never drafts, because its backlog never ends, is paused too. A wait for drafts while a step
    runs does not count as host time."""
    ways = {"trip_s": trip_s, "feature_row_s": feature_row_s, "send_row_s": send_row_s, "launch_s": launch_s}
    world = world_of_all_lengths(clock, monkeypatch, sequences, Costs(**SLOW_HOST, **ways, noise=0.06))
    world.run(2.0)
    for _ in range(2):
        assert world.run(6.0) > gain * world.rate_without()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("trip_s", "feature_row_s", "gain"),
    [(13e-3, 10e-6, 0.93), (4.8e-3, 10e-6, 1.3), pytest.param(2.4e-3, 65e-6, 1.18, marks=KNOWN_LOSS)],
)
def test_a_stalled_host_does_not_change_how_drafts_look(
    clock, monkeypatch, trip_s, feature_row_s, gain, seed
):
    """Stalled steps without drafts do not change the expected step time; a few stalled steps do not disable drafts.

    The costs are those of two H100s with such a host. Without drafts, stalls cost 2 % of throughput."""
    costs = Costs(
        **SLOW_HOST, trip_s=trip_s, feature_row_s=feature_row_s, launch_s=0.5e-3, noise=0.03, accepted=2, stall_s=15e-3
    )
    without, drafted = (Bursts(clock, monkeypatch, costs, k=k, prompt_length=64, seed=seed).run(8) for k in (0, 4))
    assert drafted > gain * without


def world_of_all_lengths(clock: Clock, monkeypatch: pytest.MonkeyPatch, sequences: int, costs: Costs) -> World:
    """Return a world of successive requests with 350 to 1050 prompt and 100 to 500 output tokens, 8B features."""
    use_rows_of_8b(monkeypatch)
    world = World(clock, 0, costs, config=CONFIG, k=4)
    draw = random.Random(0)

    def arrive(_length: int | None = None) -> None:
        world.output_length = draw.randrange(100, 500)
        World.arrive(world, draw.randrange(350, 1050))

    monkeypatch.setattr(world, "arrive", arrive)
    for _ in range(sequences):
        arrive()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_narrows_is_not_filled_with_a_backlog(clock, monkeypatch, seed):
    """The link goes from 25 to 1 Gbit/s, as in `far_drafter`. A large backlog on it would delay requested drafts,
    and drafts that gain throughput would be disabled."""
    sending = {"feature_row_s": 9e-6, "send_s": 2.5e-3, "send_row_s": 1e-6, "launch_s": 3e-3}
    costs = Costs(**SLOW_HOST, **sending, trip_s=4.2e-3, noise=0.15, accepted=2)
    bursts = Bursts(clock, monkeypatch, costs, prompt_length=64, seed=seed)
    bursts.run(3)
    costs.trip_s, costs.feature_row_s = 2.8e-3, 65.5e-6
    assert min(bursts.run() / bursts.rate_without for _ in range(4)) > 1.05


@pytest.mark.parametrize(("sequences", "gain"), [(256, 0.95), (128, 1.1), (64, 1.35)])
def test_waves_of_requests_with_prompts(clock, monkeypatch, sequences, gain):
    """All requests come at once, so that the first steps all have prompts. At 256 requests drafts lose
    (docs/decisions/027-drafts-or-none.md)."""
    without, drafted = (
        WaveWorld(clock, monkeypatch, sequences, GpuCosts(), k).serve(2 * sequences) for k in (0, NUM_DRAFTS)
    )
    assert drafted > gain * without
