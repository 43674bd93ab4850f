"""Steps and drafts together, in time that a fake clock counts: what the verifier's pacing makes of a drafter."""

from __future__ import annotations

import statistics
from dataclasses import replace

import drafting_scene
import pytest
from drafting_scene import K, Scene
from paced_world import CONFIG, Costs, LaunchingWorld, World, adaptive, num_drafts, pace_of

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
    world.drafter.costs.trip_s = 1.0  # nothing comes any more
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


@pytest.mark.parametrize("kind", [World, LaunchingWorld])
@pytest.mark.parametrize(("sequences", "deadline_s"), [(16, None), (64, None), (32, 0.5)])
def test_new_sequences_do_not_split_the_others(clock, monkeypatch, kind, sequences, deadline_s):
    """Their drafts come behind those of the others, for their prompts are read first: they miss a step, no more."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(draft_s=0.4e-3, backlog_s=3e-3, noise=0.1)
    world = kind(clock, sequences, costs, config=CONFIG, deadline_s=deadline_s)
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
    world = LaunchingWorld(clock, 16, costs, second=replace(costs, trip_s=trip_s), config=CONFIG, deadline_s=None)
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


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_a_drafter_too_far_away_is_asked_for_none(clock, sequences):
    world = adaptive(clock, sequences, Costs(trip_s=30e-3))
    world.run(2.0)
    assert world.run(5.0) > 0.93 * world.rate_without()


def test_drafts_come_back_when_the_drafter_is_near_again(clock):
    world = adaptive(clock, 8, Costs(trip_s=30e-3))
    world.run(1.5)
    assert num_drafts(world) == 0
    world.costs.trip_s = 0.2e-3
    world.run(31.0)
    assert world.run(1.0) > 1.7 * world.rate_without()


def test_the_status_of_a_drafter_says_what_was_measured(clock):
    world = adaptive(clock, 8, Costs())
    status = generate_pb2.DrafterStatus(address="drafter:1")
    world.drafting.describe(status)
    assert not status.HasField("plan")  # nothing is known yet
    world.run(2.0)
    world.drafting.describe(status)
    assert len(status.plan.tokens_per_s) == 5
    assert status.plan.expected_gain == pytest.approx(world.run(2.0) / world.rate_without(), rel=0.15)
    assert status.plan.answer_s == pytest.approx(4 * world.costs.draft_s + world.costs.trip_s, rel=0.3)
    world.drafting.handle(Disconnected(world.stream))
    world.drafting.describe(status)
    assert not status.HasField("plan")  # nothing is requested from a lost drafter


def test_drafts_are_not_waited_for_longer_than_they_gain(clock):
    """A drafter that stops answering is late after as many steps as there are drafts, long before the deadline."""
    world = adaptive(clock, 8, Costs())
    world.run(0.5)
    world.costs.trip_s = 1.0
    world.step_sizes.clear()
    world.run(0.1)
    assert len(world.step_sizes) > 0.6 * 0.1 / 4.9e-3


def test_with_as_many_drafts_as_configured_nothing_adapts(clock):
    """Neither without a deadline, which is for measurements, nor under synthetic acceptance."""
    synthetic = {**CONFIG, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    for config, deadline_s in ((CONFIG, None), (synthetic, 0.5)):
        world = World(clock, 8, Costs(trip_s=30e-3), config=config, deadline_s=deadline_s, k=4)
        world.run(1.0)
        assert num_drafts(world) == 4
        assert world.drafted.count(4) > 0.95 * len(world.drafted)  # fewer at the end of a request alone


def test_adaptive_k_can_be_asked_for_or_refused():
    synthetic = {**CONFIG, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    own = Scene(synthetic, 0.5, adaptive_k=True)
    own.connect()
    assert pace_of(own.drafting).is_adaptive
    fixed = Scene(CONFIG, 0.5, adaptive_k=False)
    fixed.connect()
    assert not pace_of(fixed.drafting).is_adaptive
