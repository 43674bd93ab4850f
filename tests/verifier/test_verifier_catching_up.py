"""Sequences whose drafter lacks rows of theirs, in time that a fake clock counts: prompts and histories on the link."""

from __future__ import annotations

import random
from types import SimpleNamespace

import drafting_scene
import pytest
from drafting_scene import Clock, K
from paced_world import CONFIG, LOADED, Costs, LaunchingWorld, World, adaptive, num_drafts, pace_of

from verifier_service import pacing
from verifier_service.draft_session import DraftSession


def test_drafts_are_not_given_up_while_sequences_catch_up(clock, monkeypatch):
    """Their drafter comes near when they have long histories, which take a second to be sent."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 20_000)
    world = World(
        clock,
        64,
        Costs(trip_s=30e-3, feature_row_s=16e-6, acceptance=0.7),
        config=CONFIG,
        k=4,
        prompt_length=3000,
        output_length=1000,
    )
    world.run(5.0)
    assert num_drafts(world) == 0
    world.costs.trip_s = 0.2e-3
    world.run(20.0)
    assert world.run(5.0) > 1.1 * world.rate_without()


NARROW = {"step_s": 6.2e-3, "row_s": 9e-6, "feature_row_s": 65e-6, "history_s": 4.5e-3}
"""Two H100s with a link of 1 Gbit/s between them; the drafter has a graph for the rows of verify steps alone."""


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("trip_s", [2e-3, 3.5e-3])
def test_drafts_for_many_come_back_though_what_the_few_lack_takes_long(clock, monkeypatch, trip_s, noise):
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(**{**NARROW, "trip_s": 40e-3, "noise": noise})
    world = World(clock, 32, costs, config=CONFIG, k=4, prompt_length=64, output_length=400)
    for i, one in enumerate(world.scene.requests):
        one.max_length -= 6 * i
    world.run(3.0)
    assert num_drafts(world) == 0
    costs.trip_s = trip_s
    assert world.run(3.0) > 0.97 * world.rate_without()
    assert world.run(4.0) > 1.2 * world.rate_without()


@pytest.mark.parametrize("seed", range(12))
def test_requests_that_come_in_bursts_over_a_narrow_link_get_drafts(clock, monkeypatch, seed):
    """The first messages are long and stand behind each other, so that they tell little of the link."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    draw = random.Random(seed)
    costs = Costs(**{**NARROW, "trip_s": draw.uniform(2e-3, 6e-3), "noise": draw.choice([0.05, 0.1, 0.3])})
    world = World(clock, 0, costs, config=CONFIG, k=4, prompt_length=64, output_length=400)
    left = 32
    while left:
        burst = min(left, draw.choice([1, 3, 8, 16]))
        left -= burst
        for _ in range(burst):
            world.arrive()
        world.run(draw.uniform(5e-3, 30e-3))
    world.run(0.3)
    assert world.run(1.2) > 1.08 * world.rate_without()


@pytest.mark.parametrize(
    ("trip_s", "feature_row_s", "gain"),
    [(3e-3, 86e-6, 1.1), (7e-3, 86e-6, 0.97), (9e-3, 86e-6, 0.97), (12e-3, 86e-6, 0.97), (6e-3, 30e-6, 1.15)],
)
def test_requests_that_all_come_at_once_lose_nothing_by_a_narrow_link(clock, monkeypatch, trip_s, feature_row_s, gain):
    """Each time the drafter lacks all prompts, for which the link takes a good part of the time that they decode."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(**LOADED, trip_s=trip_s, feature_row_s=feature_row_s, history_s=3.5e-3, acceptance=0.8)
    world = World(clock, 0, costs, config=CONFIG, k=4, prompt_length=256, output_length=400, replaces=False)
    monkeypatch.setattr(pacing.pace, "FIRST_BACKLOG_BYTES", 128 * world.stream.head.row_bytes)
    first, *rates = rates_of_turns(world, 32)
    assert min(rates) > gain
    assert first > 0.97


@pytest.mark.parametrize(
    ("sequences", "prompt_length", "trip_s", "feature_row_s", "history_s", "acceptance"),
    [(32, 2048, 4e-3, 30e-6, 3.5e-3, 0.6), (16, 256, 12e-3, 30e-6, 30e-3, 0.8), (32, 256, 4e-3, 30e-6, 30e-3, 0.6)],
)
def test_prompts_that_keep_the_link_or_the_drafter_for_long_cost_next_to_nothing(
    clock, monkeypatch, sequences, prompt_length, trip_s, feature_row_s, history_s, acceptance
):
    """Some sequences lack rows at all times, and decode beside those that draft: what that costs no plan tells."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 20000)
    costs = Costs(**LOADED, trip_s=trip_s, feature_row_s=feature_row_s, history_s=history_s, acceptance=acceptance)
    world = LaunchingWorld(clock, 0, costs, config=CONFIG, k=4, prompt_length=prompt_length)
    monkeypatch.setattr(pacing.pace, "FIRST_BACKLOG_BYTES", 128 * world.stream.head.row_bytes)
    draw = random.Random(0)
    for _ in range(sequences):
        world.output_length = draw.randrange(40, 400)
        world.arrive()
    world.output_length = 400
    world.run(2.0)
    assert world.run(20.0) > 0.975 * world.rate_without()


@pytest.mark.parametrize("trip_s", [6e-3, 9e-3])
def test_many_requests_that_come_at_once_lose_next_to_nothing_while_some_lack_rows(clock, monkeypatch, trip_s):
    """Steps are launched ahead, so that those that lack rows are in every other one beside groups that take turns."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(**LOADED, trip_s=trip_s, feature_row_s=86e-6, history_s=3.5e-3, acceptance=0.8)
    world = LaunchingWorld(clock, 0, costs, config=CONFIG, k=4, prompt_length=256, output_length=400, replaces=False)
    monkeypatch.setattr(pacing.pace, "FIRST_BACKLOG_BYTES", 128 * world.stream.head.row_bytes)
    first, *rates = rates_of_turns(world, 64)
    assert min(rates) > 0.97
    assert first > 0.95  # in which the link comes to be known


def rates_of_turns(world: World, sequences: int) -> list[float]:
    """Tokens per second over those without drafts, of each of four times that so many requests come at once, until the
    first of them has ended."""
    rates = []
    for _ in range(4):
        for _ in range(sequences):
            world.arrive()
        without, began, before = world.rate_without(), world.clock.now, world.tokens
        while len(world.scene.requests) == sequences:
            world.run(0.02)
        rates.append((world.tokens - before) / (world.clock.now - began) / without)
        while world.scene.requests:
            world.run(0.02)
    return rates


def narrow_world(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[World, DraftSession]:
    """Eight requests that draft, and whose drafter has answered everything."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    world = World(clock, 8, Costs(**NARROW), config=CONFIG, k=4, prompt_length=64, output_length=400)
    world.run(1.0)
    world.scene.flush()
    session = world.drafting._sessions[world.stream]
    assert num_drafts(world) == 4
    for message in session.unanswered.values():
        session.pace.note_answer(message, clock.now)
    session.unanswered.clear()
    return world, session


def test_nothing_is_sent_behind_histories_that_take_longer_than_a_step(clock, monkeypatch):
    """Drafts that are asked for after another step come as soon."""
    world, session = narrow_world(clock, monkeypatch)
    works = [SimpleNamespace(request=one, num_drafts=0) for one in world.scene.requests]
    num_bytes = round(2 * world.costs.step_s / session.pace.cost.link[1])
    message = session.pace.send(clock.now, num_bytes, 200, 0, 0, has_histories=True)
    for binding in session.bindings:
        binding.next_row = binding.request.num_feature_rows
        world.scene.verify(binding.request, 9)
    before = len(world.stream.steps)
    world.scene.flush()
    assert len(world.stream.steps) == before
    assert world.drafting.held_back(works) == set()
    session.pace.note_answer(message, clock.now)
    world.scene.flush()
    (asked,) = world.stream.steps[before:]
    assert list(asked.num_drafts) == [4] * 8
    assert world.drafting.held_back(works) is None


@pytest.mark.parametrize(
    ("sequences", "k", "step_s", "history_s"),
    [(8, 4, 2e-3, 12e-3), (8, 4, 4.87e-3, 35e-3), (1, 4, 4.87e-3, 35e-3), (8, 2, 2e-3, 9e-3), (8, 1, 2e-3, 9e-3)],
)
def test_drafts_are_asked_for_though_histories_take_longer_than_the_steps_that_bring_as_many_rows(
    clock, monkeypatch, sequences, k, step_s, history_s
):
    """What all have gained while nothing could be sent goes with what they are asked for."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    costs = Costs(step_s=step_s, history_s=history_s, draft_s=0.2e-3, acceptance=0.85)
    config = {"num_speculative_tokens": k}
    world = World(clock, sequences, costs, config=config, k=k, prompt_length=64, output_length=3000)
    world.run(1.0)
    assert world.run(1.0) > 1.3 * world.rate_without()


@pytest.mark.parametrize("rows", [7, 60])
def test_rows_that_a_step_in_flight_adds_to_are_sent_with_what_is_asked_for_then(clock, monkeypatch, rows):
    """Whether all lack a few, or one of them more."""
    world, session = narrow_world(clock, monkeypatch)
    requests = world.scene.requests
    lacking = session.bindings if rows == 7 else session.bindings[:1]
    for binding in session.bindings:
        binding.next_row = binding.request.num_feature_rows - (rows if binding in lacking else 0)
        binding.request.num_in_flight = 1
    before = len(world.stream.steps)
    world.scene.flush()
    assert len(world.stream.steps) == before
    assert not session.asks_nothing
    for request in requests:
        request.num_in_flight = 0
        world.scene.verify(request, 9)
    world.scene.flush()
    asked, *others = world.stream.steps[before:]
    assert list(asked.num_drafts) == [4] * (8 if rows == 7 else 7)
    assert [list(step.num_drafts) for step in others] == ([] if rows == 7 else [[0]])


def test_a_step_of_some_does_not_hold_back_what_others_are_asked_for(clock, monkeypatch):
    """Where two halves take turns, one of them is in flight at all times."""
    world, session = narrow_world(clock, monkeypatch)
    for i, binding in enumerate(session.bindings):
        binding.next_row = binding.request.num_feature_rows - 7
        binding.request.num_in_flight = i % 2
    before = len(world.stream.steps)
    world.scene.flush()
    (asked,) = world.stream.steps[before:]
    assert list(asked.num_drafts) == [4, 0] * 4


def test_nothing_is_asked_for_while_most_sequences_lack_much(clock, monkeypatch):
    """What they lack goes in messages of some steps, one after another, until what is left takes less than one."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    world = World(clock, 16, Costs(**NARROW), config=CONFIG, k=4, prompt_length=256, output_length=400)
    world.run(1.0)
    assert num_drafts(world) == 4
    for one in list(world.scene.requests):
        world.scene.end(one)
        world.scene.free(one)
    for _ in range(16):
        world.arrive()
    before = len(world.stream.steps)
    world.run(0.5)
    steps = world.stream.steps[before:]
    rows = [sum(step.num_rows) for step in steps]
    asked = [any(step.num_drafts) for step in steps]
    first = asked.index(True)
    step_rows = world.costs.step_s / world.costs.feature_row_s
    assert sum(rows[:first]) > 16 * 256 - step_rows
    assert all(count > step_rows for count in rows[1 : first - 1])
    assert max(rows) <= 4 * step_rows + 16 * 5
    assert sum(len(step.num_drafts) - list(step.num_drafts).count(0) for step in steps[-5:]) >= 2 * 16


def test_steps_follow_each_other_without_a_pause_while_nothing_is_asked_for(clock, monkeypatch):
    """Whoever catches up is launched before its step has landed, as where there are no drafts."""
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 3000)
    world = World(clock, 16, Costs(**NARROW), config=CONFIG, k=4, prompt_length=256, output_length=1000)
    world.run(1.0)
    works = [SimpleNamespace(request=one, num_drafts=0) for one in world.scene.requests]
    assert num_drafts(world) == 4
    assert world.drafting.held_back(works) is None
    for binding in world.drafting._bindings.values():
        binding.next_row = 0
    world.scene.flush()
    assert world.drafting.held_back(works) == set()
    assert world.drafting.gate.drafts_to_come(world.scene.requests) is None
    world.run(1.0)
    works = [SimpleNamespace(request=one, num_drafts=0) for one in world.scene.requests]
    assert world.drafting.held_back(works) is None


@pytest.mark.parametrize("asks_nothing", [False, True])
def test_nobody_waits_for_room_at_a_drafter_that_is_asked_for_nothing(clock, asks_nothing):
    """It has as many messages as it takes: rows of prompts, behind each other, where it is asked for nothing."""
    world = World(clock, 4, config=CONFIG, k=4, output_length=1000)
    world.run(1.0)
    (session,) = world.drafting._sessions.values()
    message = session.pace.send(clock.now, 0, 4, 4, 4)
    session.unanswered.update({-number: message for number in range(1, 33)})
    session.asks_nothing = asks_nothing
    for binding in session.bindings:
        binding.wait_until, binding.asked_length = None, 0
    sent = len(world.stream.steps)
    world.scene.flush()
    assert len(world.stream.steps) == sent
    assert [world.drafting.gate.is_waiting(one) for one in world.scene.requests] == [not asks_nothing] * 4


def test_the_few_that_try_a_drafter_are_asked_behind_rows_of_a_verify_step(clock):
    """Rows that are sent before take the drafter longer, and are no part of what drafts take."""
    costs = Costs(trip_s=4e-3, acceptance=0.05, history_s=5e-3)
    world = World(clock, 8, costs, config=CONFIG, k=4, output_length=1000)  # none ends
    world.run(0.5)
    assert pace_of(world.drafting).is_off
    before = len(world.stream.steps)
    world.run(4.0)
    steps = [step for step in world.stream.steps[before:] if step.num_rows]
    asked = [step for step in steps if any(step.num_drafts)]
    assert len(asked) > 5
    assert max(max(step.num_rows) for step in asked) <= K + 2
    assert all(max(step.num_rows) > K + 2 for step in steps if step not in asked)
    assert pace_of(world.drafting).cost.compute_s(8, 4, 2, is_beside=True) == pytest.approx(1.4e-3, rel=0.1)


def test_rows_of_a_prompt_leave_room_on_a_narrow_link(clock):
    """A prompt of 400 rows takes 26 ms of a link of 1 Gbit/s; drafts that are waited for do not stand behind it."""
    world = adaptive(clock, 4, Costs(trip_s=0.2e-3, feature_row_s=65e-6))
    world.run(1.0)
    own = world.drafter
    world.arrive(400)
    before = len(world.stream.steps)
    world.run(0.3)
    rows = [sum(step.num_rows) for step in world.stream.steps[before:]]
    assert sum(rows) >= 400
    assert max(rows) * 65e-6 < 2 * 5e-3
    assert own.longest_queue_s < 2 * 5e-3


def test_where_every_step_is_to_have_its_drafts_a_prompt_is_sent_at_once(clock):
    world = World(clock, 4, Costs(trip_s=0.2e-3, feature_row_s=65e-6), config=CONFIG, deadline_s=None, k=4)
    world.run(1.0)
    world.arrive(400)
    before = len(world.stream.steps)
    world.run(0.3)
    (with_prompt,) = [step for step in world.stream.steps[before:] if max(step.num_rows, default=0) >= 400]
    assert list(with_prompt.num_drafts) == [4]
