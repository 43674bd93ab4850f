"""Steps and drafts together, in time that a fake clock counts: groups of sequences and the number of drafts."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace

import drafting_scene
import pytest
from drafting_scene import Clock, K, Scene
from paced_world import (
    CONFIG,
    LOADED,
    OUTPUT_LENGTH,
    PROMPT_LENGTH,
    Costs,
    LaunchingWorld,
    World,
    adaptive,
    num_drafts,
    pace_of,
)

from draftwire.v1 import generate_pb2
from verifier_service.draft_stream import Disconnected
from verifier_service.pacing import NUM_SCOUTS, Pace, Plan
from verifier_service.pacing.governor import (
    PING_EVERY_S,
    REST_S,
    TRIAL_SHARE,
)
from verifier_service.pacing.hindsight import scale_of
from verifier_service.pacing.pace import PLAN_EVERY_S, TRIAL_STEPS
from verifier_service.request import Request

# Groups.


def test_sequences_of_a_near_drafter_share_every_step(clock):
    world = World(clock, 8, Costs(trip_s=1e-3))
    world.run(0.6)
    world.step_sizes.clear()
    world.run(0.2)
    assert set(world.step_sizes) == {8}


def test_two_groups_out_of_phase_become_one_where_the_drafter_is_near(clock):
    world = World(clock, 8, Costs(trip_s=1e-3))
    world.run(0.3)
    world.step_sizes.clear()
    world.drafting.gate.part_next()  # one step runs half of them
    world.run(0.1)
    assert world.step_sizes[:3] != [8, 8, 8]
    assert set(world.step_sizes[-5:]) == {8}


def test_sequences_of_a_far_drafter_part_into_groups_that_take_turns(clock):
    far = World(clock, 32, Costs(trip_s=6e-3))
    tokens = 32 * (1 + 0.75 + 0.75**2 + 0.75**3)
    together = tokens / (4.87e-3 + 128 * 6.5e-6 + 6e-3 + tokens * 8e-6 + K * 0.35e-3)  # one group, which waits for all
    far.run(0.5)
    far.step_sizes.clear()
    assert far.run(0.5) > together
    assert max(far.step_sizes) <= 1.5 * 16


def test_groups_that_take_turns_become_equal_when_sequences_have_come(clock):
    """The largest one's step takes the most time, padded to a size that was captured as it is."""
    world = World(clock, 20, Costs(trip_s=6e-3), output_length=450)  # none ends
    world.run(0.3)
    for _ in range(12):
        world.arrive()
    world.run(0.7)
    world.step_sizes.clear()
    world.run(0.5)
    assert pace_of(world.drafting).plan.num_groups == 2
    assert max(world.step_sizes) <= 17
    assert world.step_sizes.count(16) > 0.7 * len(world.step_sizes)


def test_the_groups_of_a_drafter_that_comes_near_become_one(clock):
    world = World(clock, 32, Costs(trip_s=6e-3))
    world.run(0.5)
    world.costs.trip_s = 0.2e-3
    world.run(1.0)
    assert set(world.step_sizes[-10:]) == {32}
    assert pace_of(world.drafting).plan.num_groups == 1


def test_a_step_that_is_held_ends_its_wait_at_the_draft_deadline(clock):
    world = World(clock, 8, Costs(trip_s=1e-3), deadline_s=2.5e-3)
    world.run(0.3)
    assert pace_of(world.drafting).cost.is_known
    one, *others = world.scene.requests
    world.drafter.costs.trip_s = 1.0  # nothing comes any more
    for request in world.scene.requests:
        world.scene.verify(request, 9)
    world.scene.flush()
    sent = clock.now
    one.drafts, world.drafting._bindings[one].wait_until = None, None
    assert world.drafting.gate.is_held(world.scene.requests, has_launched=False, may_admit=False)
    assert clock.now < world.drafting.next_deadline() <= sent + 2.5e-3
    clock.now = sent + 2.5e-3
    assert not world.drafting.gate.is_held(world.scene.requests, has_launched=False, may_admit=False)
    assert all(world.drafting.gate.is_ready(other) for other in others)


def test_a_group_whose_drafts_were_late_waits_for_those_of_another_that_are_near(clock):
    """As where a drafter computes on the target's own device and has none ready before a step there has ended: waiting
    with nothing that could go counts for nothing."""
    world = World(clock, 8, Costs(trip_s=1e-3))
    world.run(0.3)
    gate, requests, fixed_s = world.drafting.gate, world.scene.requests, world.drafting.gate.target_cost.fixed
    late, flying = requests[:4], requests[4:]
    for binding in world.drafting._bindings.values():
        binding.next_row = binding.request.num_feature_rows  # the rows of the last step are there

    def ask(some: list[Request], draft_s: float) -> None:
        world.costs.draft_s = draft_s
        for request in some:
            world.scene.verify(request, 9)
        world.scene.flush()

    def is_held(some: list[Request], after_s: float) -> bool:
        clock.now += after_s
        world._deliver()
        return gate.is_held(some, has_launched=True, may_admit=False)

    ask(late, 1.2 * fixed_s / K)
    assert is_held(late, 0.1 * fixed_s)
    assert is_held(late, 0.3 * fixed_s)
    clock.now += 0.3 * fixed_s
    ask(flying, 0.35e-3)
    clock.now = world.drafter.answers[0][0]  # when the first drafts come
    assert is_held(requests, 0.0)
    assert all(request.drafts for request in late)
    assert not any(request.drafts for request in flying)
    world.drafter.answers.clear()
    assert not is_held(requests, fixed_s)


@pytest.mark.parametrize("kind", [World, LaunchingWorld])
@pytest.mark.parametrize(("sequences", "deadline_s"), [(16, None), (64, None), (32, 0.5)])
def test_sequences_that_have_just_begun_do_not_part_the_others(clock, monkeypatch, kind, sequences, deadline_s):
    """Their drafts come behind those of the others, for their prompts are read first: they miss a step, no more."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(draft_s=0.4e-3, history_s=3e-3, noise=0.1)
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
def test_sequences_of_two_near_drafters_are_verified_together(clock, trip_s, seed):
    """Rather than those of one while the others draft: a step's fixed time is longer than that takes."""
    costs = Costs(draft_s=0.3e-3, noise=0.05)
    world = LaunchingWorld(clock, 16, costs, second=replace(costs, trip_s=trip_s), config=CONFIG, deadline_s=None)
    world.draw.seed(seed)
    world.run(1.0)
    world.step_sizes.clear()
    rate = world.run(2.0)
    assert statistics.mean(world.step_sizes) > 15
    assert rate > 1.7 * world.rate_without()


def test_a_request_past_its_deadline_is_held_for_others_no_longer_than_one_that_is_ready(clock):
    """Another drafter than theirs is silent."""
    world = World(clock, 8, Costs(trip_s=1e-3))
    world.run(0.3)
    gate, requests, fixed_s = world.drafting.gate, world.scene.requests, world.drafting.gate.target_cost.fixed
    silent = world.scene.connect()
    world.arrive(K)  # behind a longer prompt none are asked for
    world.scene.flush()
    overdue = world.drafting._bindings[requests[-1]]
    assert (overdue.session.stream, overdue.is_waiting) == (silent, True)
    clock.now = deadline = overdue.wait_until
    world.costs.draft_s = 0.7 * fixed_s / K
    for group in (requests[:4], requests[4:8]):
        for request in group:
            world.scene.verify(request, 9)
        world.scene.flush()
    held = {}
    for share in (0.0, 0.5, 0.95, 1.1):
        clock.now = deadline + share * fixed_s
        world._deliver()
        held[share] = gate.is_held(requests, has_launched=True, may_admit=False)
    assert sum(request.drafts is not None for request in requests) == 4
    assert held == {0.0: True, 0.5: True, 0.95: True, 1.1: False}


def test_sequences_without_drafts_wait_for_those_that_come_while_the_host_launches_the_joint_step(clock):
    world = World(clock, 8, Costs(trip_s=0.4e-3))
    world.run(0.3)
    gate, requests = world.drafting.gate, world.scene.requests
    for _ in range(24):
        plain = world.scene.admit(PROMPT_LENGTH, max_tokens=OUTPUT_LENGTH, k=0)
        plain.num_computed = PROMPT_LENGTH
        plain.tokens.append(9)
    for request in requests:
        world.scene.verify(request, 9)
    world.scene.flush()
    assert not gate.is_held(requests, has_launched=False, may_admit=False)  # nothing is known of what a launch takes
    gate.target_cost.observe_host(1.5e-3, clock.now, is_beside=False)
    assert gate.is_held(requests, has_launched=False, may_admit=False)
    assert not gate.is_held(requests, has_launched=True, may_admit=False)
    world.scene.admit(PROMPT_LENGTH, k=0)  # its prompt is not computed: the joint step is launched with its drafts
    assert not gate.is_held(requests, has_launched=False, may_admit=False)


@pytest.mark.parametrize("trip_s", [0.2e-3, 3e-3, 12e-3])
def test_no_sequence_is_left_out_for_long(clock, trip_s):
    world = World(clock, 16, Costs(trip_s=trip_s))
    world.run(0.3)
    before = {request: len(request.tokens) for request in world.scene.requests}
    world.run(0.1)
    assert all(len(request.tokens) > length for request, length in before.items())


@pytest.mark.parametrize(("trip_s", "drafts", "are_soon"), [(0.2e-3, K, True), (8e-3, K, False), (0.2e-3, 0, False)])
def test_drafts_come_soon_where_they_are_nearer_than_the_fixed_time_of_a_step(clock, trip_s, drafts, are_soon):
    world = World(clock, 4, Costs(trip_s=trip_s))
    come_soon = world.drafting.gate.come_soon
    assert not come_soon(world.scene.requests)  # nothing is known yet
    world.run(1.0)
    world.scene.flush()
    pace_of(world.drafting).governor.plan = Plan(drafts)
    assert come_soon(world.scene.requests) == are_soon
    (session,) = world.drafting._sessions.values()
    session.is_late = True
    assert not come_soon(world.scene.requests)


# How many drafts are asked for. K = 4, c = 0.75.


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_a_near_drafter_is_asked_for_all_drafts(clock, sequences):
    world = adaptive(clock, sequences, Costs())
    assert world.run(1.0) > 1.4 * world.rate_without()
    assert num_drafts(world) == 4


@pytest.mark.parametrize(("trip_s", "asked"), [(0.2e-3, 4), (30e-3, 0)])
def test_the_status_of_a_drafter_says_what_is_asked_of_it_and_why(clock, trip_s, asked):
    world = adaptive(clock, 8, Costs(trip_s=trip_s))
    status = generate_pb2.DrafterStatus(address="drafter:1")
    world.drafting.describe(status)
    assert not status.HasField("plan")  # nothing is known yet
    world.run(2.0)
    world.drafting.describe(status)
    plan, costs = status.plan, world.costs
    assert (plan.num_drafts, plan.num_groups) == (asked, 1)
    assert plan.best_num_drafts > 0
    if asked:
        assert (plan.best_num_drafts, plan.best_num_groups) == (asked, 1)
        assert plan.expected_gain == pytest.approx(world.run(2.0) / world.rate_without(), rel=0.1)
        assert plan.features_s == pytest.approx(8 * 3.05 * costs.feature_row_s, rel=0.2)  # 0.75 + .. + 0.75**4 accepted
        assert plan.compute_s == pytest.approx(4 * costs.draft_s, rel=0.1)
    else:
        assert plan.expected_gain < 1
    assert plan.trip_s == pytest.approx(trip_s, rel=0.2)
    assert plan.step_s == pytest.approx(costs.step_s + 8 * costs.row_s, rel=0.1)


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_a_drafter_further_away_than_its_drafts_gain_is_asked_for_none(clock, sequences):
    world = adaptive(clock, sequences, Costs(trip_s=30e-3))
    world.run(0.5)
    assert num_drafts(world) == 0
    assert world.run(1.0) > 0.97 * world.rate_without()


def test_drafts_come_back_when_the_drafter_comes_near_again(clock):
    world = adaptive(clock, 8, Costs(trip_s=30e-3))
    world.run(1.5)
    assert num_drafts(world) == 0
    world.costs.trip_s = 0.2e-3
    world.run(2.0)
    assert num_drafts(world) == 4
    assert world.run(0.5) > 1.7 * world.rate_without()


@pytest.mark.parametrize(("acceptance", "least", "most"), [(0.9, 4, 4), (0.4, 1, 3), (0.03, 0, 0)])
def test_drafts_that_are_rarely_accepted_are_asked_for_less(clock, acceptance, least, most):
    world = adaptive(clock, 8, Costs(trip_s=0.4e-3, acceptance=acceptance))
    world.run(1.0)
    assert least <= num_drafts(world) <= most


SLOW = {"step_s": 14.5e-3, "row_s": 1.9e-3, "trip_s": 3e-3, "draft_s": 2.5e-3}
"""A small model on a CPU, where four drafts of which few are accepted are slower than none."""


def test_a_drafter_is_not_given_up_for_its_first_drafts(clock):
    """The first tokens of one text say little of the drafts after them."""
    world = adaptive(clock, 1, Costs(**SLOW, acceptance=0.1))
    world.run(0.45)
    assert len(world.step_sizes) >= 8
    world.costs.acceptance = 0.85
    assert world.run(2.0) > 1.2 * world.rate_without()
    assert num_drafts(world) >= 3


def test_the_first_tokens_of_texts_do_not_decide_for_all(clock):
    """Drafts of theirs are slower than none, and then all others are faster."""
    costs = Costs(step_s=6e-3, row_s=0.25e-3, draft_s=1e-3, trip_s=2e-3, acceptance=0.9, first_acceptance=0.5)
    world = adaptive(clock, 8, costs)
    assert world.run(1.0) > 0.97 * world.rate_without()
    assert world.run(4.0) > 1.2 * world.rate_without()


def test_drafts_of_no_use_are_given_up_after_a_few(clock):
    world = adaptive(clock, 1, Costs(**SLOW, acceptance=0.1))
    world.run(2.5)
    assert num_drafts(world) == 0
    assert world.run(5.0) > 0.97 * world.rate_without()


@pytest.mark.parametrize("steps", [1.2, 1.5])
def test_drafts_that_lose_are_given_up_though_the_drafter_never_has_a_pause(clock, steps):
    """It takes so many steps' time for each of two sequences that came one after the other."""
    world = adaptive(clock, 1, Costs(draft_s=steps * 4.87e-3 / 4, acceptance=0.2))
    world.run(0.02)
    world.arrive()
    world.run(0.6)
    assert num_drafts(world) == 0
    assert world.run(2.0) > 0.97 * world.rate_without()


def test_few_trials_show_that_drafts_are_accepted_again(clock):
    """One sequence makes one in 1.3 s."""
    world = adaptive(clock, 1, Costs(**SLOW, acceptance=0.05))
    world.run(5.0)
    assert num_drafts(world) == 0
    world.costs.acceptance = 0.9
    world.run(15.0)
    assert num_drafts(world) >= 2


def test_drafts_come_back_when_they_are_accepted_again(clock):
    """A drafter whose drafts are of no use is tried with a few sequences."""
    world = adaptive(clock, 8, Costs(acceptance=0.03))
    world.run(1.0)
    assert num_drafts(world) == 0
    world.costs.acceptance = 0.9
    world.run(4.0)
    assert num_drafts(world) == 4


@pytest.mark.parametrize("acceptance", [0.4, 0.8])
@pytest.mark.parametrize("row_s", [4e-6, 80e-6])
@pytest.mark.parametrize("trip_s", [0.4e-3, 2e-3, 10e-3])
@pytest.mark.parametrize("sequences", [1, 16])
def test_throughput_is_never_under_that_without_drafts(clock, sequences, trip_s, row_s, acceptance):
    """By more than the looking after a drafter takes."""
    world = adaptive(clock, sequences, Costs(trip_s=trip_s, feature_row_s=row_s, acceptance=acceptance))
    world.run(1.0)
    assert world.run(1.5) > 0.97 * world.rate_without()


@pytest.mark.parametrize(
    ("sequences", "unseen_s", "gain"),
    [(32, 0.35e-3, 0.97), (64, 0.2e-3, 0.97), (8, 1.5e-3, 0.97), (32, 0.12e-3, 1.1), (8, 0.5e-3, 1.2)],
)
def test_drafts_that_gain_less_than_is_known_of_their_costs_are_given_up_where_none_are_faster(
    clock, sequences, unseen_s, gain
):
    """The first three would go on at 0.66 to 0.78 of the throughput without drafts. Each number of groups shows it for
    itself."""
    world = adaptive(clock, sequences, Costs(unseen_s=unseen_s))
    world.run(3.0)
    assert world.run(5.0) > gain * world.rate_without()
    assert world.run(30.0) > gain * world.rate_without()


def test_what_many_sequences_lose_by_drafts_keeps_none_from_one(clock):
    """Nor has it to be learnt from the start when they are back: it takes a quarter of a second at most."""
    world = adaptive(clock, 32, Costs(unseen_s=0.35e-3))
    world.run(10.0)
    for _ in range(4):
        for one in world.scene.requests[1:]:
            world.scene.end(one)
            world.scene.free(one)
        assert world.run(2.0) > 1.8 * world.rate_without()
        for _ in range(31):
            world.arrive()
        assert world.run(3.0) > 0.97 * world.rate_without()


def test_a_drafter_with_fewer_places_than_sequences_rests_when_it_was_given_up(clock):
    """The sequences that it would get are more than those that it has."""
    world = adaptive(clock, 32, Costs(unseen_s=1.5e-3))
    world.stream.head = replace(world.stream.head, max_sequences=8)
    world.run(10.0)
    world.drafted.clear()
    assert world.run(30.0) > 0.97 * world.rate_without()
    assert sum(count > 0 for count in world.drafted) < 0.05 * len(world.drafted)


def test_drafts_come_back_when_they_gain_what_is_known_of_their_costs(clock):
    world = adaptive(clock, 32, Costs(unseen_s=0.35e-3))
    world.run(3.0)
    assert num_drafts(world) == 0
    world.costs.unseen_s = 0.0
    world.run(15.0)
    assert num_drafts(world) == 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("costs", "gain"),
    [
        (Costs(trip_s=3e-3, acceptance=0.6, unseen_step_s=1e-3), 1.1),
        (Costs(trip_s=2.2e-3, acceptance=0.5, unseen_step_s=2e-3), 1.17),
    ],
)
def test_what_all_steps_take_and_nothing_counts_is_no_reason_to_give_up_drafts(clock, costs, gain, seed):
    """But once, at first: it takes steps without drafts to see that they take it too."""
    world = World(clock, 16, costs, config=CONFIG, k=4, output_length=400)
    world.draw.seed(seed)
    without = 16 / (16 / world.rate_without() + costs.unseen_step_s)
    world.run(20.0)
    world.drafted.clear()
    assert world.run(60.0) > gain * without
    assert world.drafted.count(0) < 0.02 * len(world.drafted)


@pytest.mark.parametrize("seed", range(3))
def test_noise_gives_up_no_drafts_that_gain(clock, monkeypatch, seed):
    """Though they were given up five times in a row."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 6000)
    costs = Costs(**{**LOADED, "noise": 0.1}, trip_s=2e-3, feature_row_s=30e-6, history_s=3.5e-3, acceptance=0.6)
    world = World(clock, 16, costs, config=CONFIG, k=4, prompt_length=256, output_length=400)
    world.draw.seed(seed)
    world.run(2.0)
    rests = pace_of(world.drafting).governor._rests
    rests[scale_of(16)].seconds = REST_S[1]
    assert world.run(20.0) > 1.2 * world.rate_without()
    assert rests[scale_of(16)].until < 0.0  # never


def test_what_a_drafter_has_brought_is_forgotten_when_it_goes(clock):
    world = adaptive(clock, 8, Costs())
    world.stream.address = "gone:1"
    world.run(0.5)
    assert "gone:1" in {drafter for drafter, _ in world.drafting.gate._verified}
    other = world.scene.connect()
    world.drafting.handle(Disconnected(world.stream))
    (session,) = world.drafting._sessions.values()
    assert session.stream is other
    world.clock.now += 1.0
    world.scene.flush()
    assert not any(drafter for drafter, _ in world.drafting.gate._verified)


def test_noise_does_not_mislead(clock):
    for trip_s, gain in ((0.4e-3, 1.6), (30e-3, 0.97)):
        world = adaptive(clock, 8, Costs(trip_s=trip_s, noise=0.2))
        world.run(0.5)
        assert world.run(2.0) > gain * world.rate_without()


def test_with_as_many_drafts_as_configured_nothing_adapts(clock):
    """Neither without a deadline, which is for output that a seed reproduces, nor under synthetic acceptance."""
    synthetic = {**CONFIG, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    for config, deadline_s in ((CONFIG, None), (synthetic, 0.5)):
        world = World(clock, 8, Costs(trip_s=30e-3), config=config, deadline_s=deadline_s, k=4)
        world.run(1.0)
        assert num_drafts(world) == 4
        assert world.drafted.count(4) > 0.95 * len(world.drafted)  # fewer at the end of a request alone


def test_adaptive_k_can_be_asked_for_under_synthetic_acceptance():
    synthetic = {**CONFIG, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    own = Scene(synthetic, 0.5, adaptive_k=True)
    own.connect()
    assert pace_of(own.drafting).governor.is_adaptive
    fixed = Scene(CONFIG, 0.5, adaptive_k=False)
    fixed.connect()
    assert not pace_of(fixed.drafting).governor.is_adaptive


# A drafter that is asked for nothing.


def far_world(clock: Clock, sequences: int = 8, **costs: float) -> World:
    """Whose drafter has been given up."""
    world = adaptive(clock, sequences, Costs(**{"trip_s": 30e-3, **costs}))
    world.run(0.5)
    assert pace_of(world.drafting).is_off
    return world


def test_a_drafter_that_is_asked_for_nothing_is_sent_next_to_nothing(clock):
    world = far_world(clock, 32)
    before, began = len(world.stream.steps), clock.now
    world.run(8.0)
    sent = world.stream.steps[before:]
    asked = [step for step in sent if any(step.num_drafts)]
    most = (clock.now - began) / PING_EVERY_S + 1
    assert 0 < len(asked) <= most
    assert len(sent) <= 2 * most  # what they lack is sent before
    rows = world.rate_without() * 8.0 * (1 + PROMPT_LENGTH / OUTPUT_LENGTH)
    assert 0 < sum(sum(step.num_rows) for step in sent) < 0.1 * rows


def test_nobody_waits_for_a_drafter_that_could_not_gain_if_all_its_drafts_were_accepted(clock):
    world = far_world(clock)
    world.step_sizes.clear()
    world.run(1.0)
    assert set(world.step_sizes) == {8}


def test_the_wait_for_trials_of_a_drafter_takes_a_percent_of_the_time(clock):
    """Its drafts are of no use at present, but could be."""
    world = far_world(clock, 1, trip_s=4e-3, acceptance=0.05)
    before = len(world.stream.steps)
    assert world.run(5.0) > 0.975 * world.rate_without()
    assert any(any(step.num_drafts) for step in world.stream.steps[before:])


def test_a_trial_alone_keeps_requests_out_of_a_step_and_no_more_than_it_is_of(clock):
    """All have a place at a drafter that was given up a moment ago, and lack no more than a step brings."""
    world = adaptive(clock, 8, Costs(trip_s=30e-3))
    world.run(0.2)
    governor = pace_of(world.drafting).governor
    governor._turn_off(clock.now)
    works = [SimpleNamespace(request=one, num_drafts=0) for one in world.scene.requests]
    world.drafter.answers.clear()
    world.drafting._sessions[world.stream].unanswered.clear()
    for binding in world.drafting._sessions[world.stream].bindings:
        binding.next_row = binding.request.num_feature_rows
    assert world.drafting.held_back(works) == set()
    clock.now += PING_EVERY_S
    assert governor.is_ping_due(clock.now)
    assert world.drafting.held_back(works) == set()
    governor._trial_every_s = PING_EVERY_S
    assert world.drafting.held_back(works) == {one.request for one in world.drafting._sessions[world.stream].scouts}


@pytest.mark.parametrize("obstacle", ["last token", "rows that take several messages"])
def test_a_trial_that_could_ask_for_no_drafts_is_not_counted(clock, obstacle, monkeypatch):
    world = far_world(clock, 2, trip_s=4e-3, acceptance=0.05)
    governor = pace_of(world.drafting).governor
    world.run(0.15)
    clock.now += 10.0
    assert governor.is_trial_due(clock.now)
    if obstacle == "last token":
        for one in world.scene.requests:
            one.max_length = len(one.tokens) + 1
    else:
        monkeypatch.setattr(Pace, "backlog_rows", lambda *_, **__: 1)
    before = len(world.stream.steps)
    world.scene.flush()
    assert len(world.stream.steps) == before + 1
    assert governor.is_trial_due(clock.now + PING_EVERY_S)


def test_the_few_are_sent_all_that_they_lack_before_they_are_asked_for(clock, monkeypatch):
    """However little goes in a message: else a trial keeps them out of a step and asks for nothing."""
    world = far_world(clock, 32, trip_s=4e-3, acceptance=0.05)
    monkeypatch.setattr(Pace, "backlog_rows", lambda *_, **__: 16)
    before = len(world.stream.steps)
    world.run(3.0)
    sent = world.stream.steps[before:]
    asked = [step for step in sent if any(step.num_drafts)]
    assert sum(max(step.num_rows) > K + 1 for step in sent) > len(asked) > 8
    assert all(any(step.num_drafts) for step in sent if max(step.num_rows, default=K + 2) <= K + 1)


def test_the_few_of_many_that_try_a_drafter_do_not_fall_behind(clock):
    """A trial keeps them out of a step or two, and they wait no larger a share of their time than one alone would."""
    world = far_world(clock, 32, trip_s=4e-3, acceptance=0.05)
    world.step_sizes.clear()
    world.run(5.0)
    parted = sum(size < 32 for size in world.step_sizes)
    assert 0 < parted < 0.02 * len(world.step_sizes)


@pytest.mark.parametrize("tokens", [1.0, 2.0, 5.0])
def test_a_trial_counts_the_steps_that_others_take_meanwhile_but_for_the_tokens_that_it_brings(clock, tokens):
    """One sequence alone misses none."""
    takes_s = {}
    for sequences in (1, 32):
        world = far_world(clock, sequences, trip_s=4e-3, acceptance=0.05)
        pace = pace_of(world.drafting)
        pace.acceptance.expected_tokens = lambda: [1.0, *[tokens] * K, tokens]  # type: ignore[method-assign]
        world.run(1.1 * PLAN_EVERY_S)
        assert pace.is_off
        takes_s[sequences] = pace.governor._trial_every_s * TRIAL_SHARE
    missed = max(0.0, TRIAL_STEPS - (tokens - 1.0))
    assert takes_s[32] - takes_s[1] == pytest.approx(missed * pace._step_s, abs=1e-3)


def test_sequences_left_behind_are_closed_and_opened_again_when_drafts_are_back(clock):
    world = far_world(clock)
    world.run(1.0)
    assert world.drafting.sequences_at("drafter:1") <= NUM_SCOUTS
    assert len({sequence for step in world.stream.steps for sequence in step.closed_ids}) >= 6
    world.costs.trip_s = 0.2e-3
    world.run(2.0)
    assert world.drafting.sequences_at("drafter:1") == 8


def test_drafts_of_no_use_to_many_stay_away_while_the_many_end_and_others_come(clock):
    """For a moment a few are left, for whom drafts gain."""
    heavy = Costs(trip_s=1e-3, unseen_s=0.4e-3)
    assert adaptive(clock, 2, heavy).run(2.0) > 1.5 * adaptive(clock, 2, heavy).rate_without()
    world = adaptive(clock, 32, heavy)
    world.run(2.0)
    assert num_drafts(world) == 0
    for _ in range(4):
        left = world.scene.requests[2:]
        for one in left:
            world.scene.end(one)
            world.scene.free(one)
        world.run(0.1)
        assert num_drafts(world) == 0
        for _ in left:
            world.arrive()
        world.run(0.2)


def test_the_scale_of_the_load_is_that_of_all_requests_that_run(clock):
    """Those whose prompts are computed draft in a moment."""
    world = adaptive(clock, 1, Costs())
    world.run(0.5)
    pace = pace_of(world.drafting)
    assert pace._hindsight.scale == scale_of(1)
    for _ in range(15):
        world.scene.admit(PROMPT_LENGTH, max_tokens=OUTPUT_LENGTH, k=K)
    world.run(2 * PLAN_EVERY_S)
    assert pace._hindsight.scale == scale_of(16)


# Waiting.


def test_drafts_are_not_waited_for_longer_than_they_can_gain(clock):
    """A drafter that stops to answer is late after as many steps as there are drafts, long before the deadline."""
    world = adaptive(clock, 8, Costs())
    world.run(0.5)
    world.costs.trip_s = 1.0
    world.step_sizes.clear()
    world.run(0.1)
    assert len(world.step_sizes) > 0.6 * 0.1 / 4.9e-3


# Several drafters.


def test_what_another_drafters_sequences_lack_is_no_failure_of_this_ones_plan(clock):  # noqa: ARG001
    scene = Scene(CONFIG, 0.5)
    streams = [scene.connect(), scene.connect()]
    requests = [scene.decode() for _ in range(4)]
    scene.flush()
    own, other = (scene.drafting._sessions[stream] for stream in streams)
    assert (len(own.bindings), len(other.bindings)) == (2, 2)
    load = scene.drafting._load(own, requests)
    assert (load.sequences, load.behind, load.decoding) == (2, 0, 4)
    assert load.other_tokens > 2
    other.bindings[0].next_row -= 1
    assert scene.drafting._load(own, requests).behind == 1
    other.is_late = True  # they decode without drafts
    late = scene.drafting._load(own, requests)
    assert (late.behind, late.other_rows, late.other_tokens, late.decoding) == (0, 2.0, 2.0, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("acceptance", "trip_s"), [(0.7, 1e-3), (0.2, 1e-3), (0.7, 12e-3)])
@pytest.mark.parametrize(("kind", "gain"), [(World, 1.25), (LaunchingWorld, 1.4)])
def test_two_drafters_of_which_one_may_be_bad_or_far_gain_together(
    clock, monkeypatch, kind, gain, acceptance, trip_s, seed
):
    """Their sequences share steps and wait for each other. What one loses is no reason to give up the other, nor makes
    it seem slow to ask for nothing."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    near = Costs(**LOADED, trip_s=1e-3, feature_row_s=20e-6, history_s=3.5e-3, acceptance=0.7)
    other = replace(near, trip_s=trip_s, acceptance=acceptance)
    world = kind(clock, 0, near, second=other, config=CONFIG, k=4, prompt_length=128)
    world.draw.seed(seed)
    for _ in range(32):
        world.output_length = world.draw.randrange(40, 300)
        world.arrive()
    world.output_length = 300
    world.run(4.0)
    assert world.run(8.0) > gain * world.rate_without()
