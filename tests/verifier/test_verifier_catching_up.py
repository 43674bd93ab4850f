"""Sequences whose drafter lacks rows of theirs, in time that a fake clock counts: prompts and histories on the link."""

from __future__ import annotations

import random
from types import SimpleNamespace

import drafting_scene
import pytest
from drafting_scene import Clock, K, make_head
from paced_world import CONFIG, LOADED, Costs, LaunchingWorld, World, adaptive, num_drafts, pace_of

from draftwire.v1 import draft_pb2 as pb
from verifier_service import pacing
from verifier_service.draft_session import DraftSession
from verifier_service.pacing import copying


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
    assert first > 0.95


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
    assert min(rates_of_turns(world, 64)) > 0.96


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
    session.unanswered.clear()
    session.pace._link_free = session.pace._histories_through = 0.0
    return world, session


def test_nothing_is_sent_behind_histories_that_take_longer_than_a_step(clock, monkeypatch):
    """Drafts that are asked for after another step come as soon."""
    world, session = narrow_world(clock, monkeypatch)
    works = [SimpleNamespace(request=one, num_drafts=0) for one in world.scene.requests]
    message = session.pace.send(clock.now, 0, 200, 0, 0, has_histories=True)
    session.pace._histories_through = clock.now + 2 * world.costs.step_s
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
    (message,) = list(session.unanswered.values())[:1] or [session.pace.send(clock.now, 0, 4, 4, 4)]
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


BY_BYTES = {"step_s": 6.2e-3, "row_s": 9e-6, "draft_s": 0.25e-3, "acceptance": 0.7, "history_s": 1.8e-3, "noise": 0.05}
"""Two H100s, on one of which the host takes 3.5 ms to launch a step beside another one."""


@pytest.mark.parametrize("trip_s", [2.5e-3, 4e-3])
@pytest.mark.parametrize(
    ("feature_row_s", "send_row_s", "gain"), [(65e-6, 37e-6, 0.95), (20e-6, 16e-6, 1.0), (8e-6, 3e-6, 1.1)]
)
def test_requests_that_come_at_once_lose_little_by_what_it_takes_to_send_their_rows(
    clock, monkeypatch, trip_s, feature_row_s, send_row_s, gain
):
    """That holds up the next steps, for as long as sequences catch up."""
    use_rows_of_8b(monkeypatch)
    sending = {"trip_s": trip_s, "feature_row_s": feature_row_s, "send_row_s": send_row_s, "launch_s": 3.5e-3}
    world = LaunchingWorld(
        *(clock, 0, Costs(**BY_BYTES, **sending)),
        config=CONFIG,
        k=4,
        prompt_length=256,
        output_length=400,
        replaces=False,
    )

    def run_burst() -> None:
        for _ in range(32):
            world.arrive()
        world.run(100.0)

    run_burst()  # in which it comes to be known
    began, before = clock.now, world.tokens
    for _ in range(3):
        run_burst()
    without = 32 / (BY_BYTES["step_s"] + 32 * BY_BYTES["row_s"]) / (1 + BY_BYTES["noise"])
    assert world.tokens - before > gain * without * (clock.now - began)


def use_rows_of_8b(monkeypatch) -> None:
    """What is counted in bytes is as many rows as of the 8B shape's features."""
    row_bytes = make_head().row_bytes
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 20_000)
    monkeypatch.setattr(pacing.pace, "FIRST_BACKLOG_BYTES", 128 * row_bytes)
    for name, rows in (("LEAST_BYTES", 16), ("FIRST_BYTES", 192), ("MOST_BYTES", 2048)):
        monkeypatch.setattr(copying, name, rows * row_bytes)


SLOW_HOST = {"step_s": 6.2e-3, "row_s": 9e-6, "draft_s": 0.3e-3, "history_s": 2.5e-3}
"""Two H100s on whose host a step takes up to 3.5 ms to launch, and a row of features up to 37 us to be sent."""


@pytest.mark.parametrize("trip_s", [2.4e-3, 3.9e-3, 5.5e-3])
@pytest.mark.parametrize(("launch_s", "noise"), [(2e-3, 0.03), (3.5e-3, 0.03), (3.5e-3, 0.1)])
def test_requests_that_come_at_once_lose_little_where_the_host_and_the_link_are_slow(
    clock, monkeypatch, trip_s, launch_s, noise
):
    """As `benchmarks.far_drafter` has them: all that the host sends in a message counts, new rows of those too that
    lack nothing."""
    use_rows_of_8b(monkeypatch)
    costs = Costs(
        **SLOW_HOST,
        trip_s=trip_s,
        feature_row_s=65e-6,
        send_row_s=37e-6,
        launch_s=launch_s,
        noise=noise,
        accepted=2,
    )
    world = LaunchingWorld(clock, 0, costs, config=CONFIG, k=4, prompt_length=256, output_length=400, replaces=False)
    for _ in range(3):
        began, before = clock.now, world.tokens
        for _ in range(2):
            for _ in range(32):
                world.arrive()
            without = world.rate_without()
            world.run(100.0)
        assert world.tokens - before > 0.965 * without * (clock.now - began)


@pytest.mark.parametrize(
    ("sequences", "trip_s", "feature_row_s", "send_row_s", "launch_s", "gain"),
    [
        (64, 2.4e-3, 65e-6, 37e-6, 3.5e-3, 0.97),  # which no drafts are worth
        (64, 5.0e-3, 65e-6, 10e-6, 1.0e-3, 0.97),
        (8, 2.4e-3, 65e-6, 37e-6, 3.5e-3, 1.15),
        (8, 2.4e-3, 20e-6, 16e-6, 3.5e-3, 1.4),
    ],
)
def test_requests_that_follow_each_other_lose_nothing_where_the_host_and_the_link_are_slow(
    clock, monkeypatch, sequences, trip_s, feature_row_s, send_row_s, launch_s, gain
):
    """A drafter that has never drafted, for its rows never get there, is given up too; and whoever waits for drafts
    beside a step says nothing of the host."""
    ways = {"trip_s": trip_s, "feature_row_s": feature_row_s, "send_row_s": send_row_s, "launch_s": launch_s}
    world = world_of_all_lengths(clock, monkeypatch, sequences, Costs(**SLOW_HOST, **ways, noise=0.06))
    world.run(2.0)
    for _ in range(2):
        assert world.run(6.0) > gain * world.rate_without()


def test_a_drafter_that_was_given_up_before_it_ever_drafted_is_tried_again(clock, monkeypatch):
    """Though rows of prompts take it so long that the few that look after it are never close when they are sent."""
    ways = {"trip_s": 2.4e-3, "feature_row_s": 65e-6, "send_row_s": 37e-6, "launch_s": 3.5e-3}
    costs = Costs(**SLOW_HOST | {"history_s": 45e-3}, **ways, noise=0.06)
    world = world_of_all_lengths(clock, monkeypatch, 64, costs)
    world.run(8.0)
    assert not pace_of(world.drafting).cost.is_known
    costs.trip_s, costs.feature_row_s, costs.send_row_s, costs.launch_s = 0.2e-3, 8e-6, 1e-6, 0.5e-3
    monkeypatch.setattr(world, "arrive", lambda _length=None: None)
    while len(world.scene.requests) > 8:
        world.run(0.05)
    monkeypatch.setattr(world, "arrive", lambda _length=None: LaunchingWorld.arrive(world, 32))
    world.run(10.0)
    assert world.run(10.0) > 1.2 * world.rate_without()


def test_nobody_waits_for_long_until_the_few_have_caught_up(clock, monkeypatch):
    """The host can send hardly more than steps bring, so that it would take much longer than is thought."""
    ways = {"trip_s": 0.2e-3, "feature_row_s": 8e-6, "send_row_s": 20e-6, "launch_s": 4.5e-3}
    costs = Costs(**SLOW_HOST, **ways, noise=0.06, acceptance=0.9)
    world = world_of_all_lengths(clock, monkeypatch, 32, costs)
    world.run(2.0)
    (session,) = world.drafting._sessions.values()
    waits = []
    for _ in range(600):
        world.run(0.02)
        waits.append(clock.now - session.few_since)
    assert 1.9 < max(waits) < 2.1


def world_of_all_lengths(clock: Clock, monkeypatch: pytest.MonkeyPatch, sequences: int, costs: Costs) -> LaunchingWorld:
    """Requests of 350 to 1050 and 100 to 500 tokens that follow each other, with features of the 8B shape."""
    use_rows_of_8b(monkeypatch)
    world = LaunchingWorld(clock, 0, costs, config=CONFIG, k=4)
    draw = random.Random(0)

    def arrive(_length: int | None = None) -> None:
        world.output_length = draw.randrange(100, 500)
        LaunchingWorld.arrive(world, draw.randrange(350, 1050))

    monkeypatch.setattr(world, "arrive", arrive)
    for _ in range(sequences):
        arrive()
    return world


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("copies", [False, True])
def test_what_a_step_with_drafts_waits_for_beside_another_one_says_nothing_of_the_host(clock, copies, num_drafts):
    gate = World(clock, 32).drafting.gate
    limit = gate.copy_limit.num_bytes
    for _ in range(9):
        gate.count_sent(32, has_histories=copies, copied_bytes=int(limit) * copies)
        clock.now += 10e-3
        verified = {("drafter:1", num_drafts): 32}
        times = {"step_s": 7e-3, "host_s": 3e-3, "landed": clock.now}
        gate.count_step(32 * (1 + num_drafts), has_prompts=False, verified=verified, is_beside=True, **times)
    says = num_drafts == 0
    assert gate.target_cost.beside_s == (3e-3 if says and not copies else 0.0)
    assert (gate.copy_limit.num_bytes < limit) == (says and copies)


@pytest.mark.parametrize("carrier", [pb.CARRIER_BYTES, pb.CARRIER_SHM])
def test_rows_that_the_host_copies_are_sent_a_little_at_a_time(clock, monkeypatch, carrier):
    monkeypatch.setattr(drafting_scene, "NUM_BLOCKS", 6000)
    monkeypatch.setattr(copying, "FIRST_BYTES", 500 * make_head().row_bytes)
    world = World(clock, 32, Costs(trip_s=2e-3, feature_row_s=5e-6), config=CONFIG, k=4, prompt_length=2000)
    monkeypatch.setattr(type(world.stream.sender), "carrier", carrier)
    world.run(1.0)
    rows = [count for step in world.stream.steps for count in step.num_rows]
    assert (max(rows) <= 500) == (carrier == pb.CARRIER_BYTES)
    assert world.run(3.0) > 1.1 * world.rate_without()
