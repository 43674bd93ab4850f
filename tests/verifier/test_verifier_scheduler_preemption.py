"""A request is preempted for want of blocks, and computed again."""

from __future__ import annotations

import pytest
from scheduler_scene import Batch, give_drafts, request, with_priority

from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.request import Request


def fill(batch: Batch, *lengths: int) -> list[Request]:
    """Requests whose next rows all need a new block, in a cache that has no other."""
    requests = batch.start(*(length * BLOCK_SIZE for length in lengths))
    assert batch.cache.num_free == len(lengths) - 1
    return requests


def test_the_last_admitted_request_gives_its_blocks_to_earlier():
    batch = Batch(blocks=6)
    first, second, third = fill(batch, 1, 1, 2)
    assert batch.step() == [first, second]
    assert batch.preempted == [third]
    assert (batch.running, batch.waiting) == ([first, second], [third])
    assert batch.cache.num_free == 2


@pytest.mark.parametrize("priorities", [(1, 0, 0), (0, 3, 2), (7, 7, 1)])
def test_the_last_in_order_of_priority_is_preempted(priorities):
    batch = Batch(blocks=6)
    requests = [with_priority(priority, prompt_length=BLOCK_SIZE) for priority in priorities]
    batch.add(*requests)
    batch.step()
    in_order = sorted(requests, key=lambda one: one.priority)
    assert batch.running == in_order
    while not batch.preempted:
        batch.step()
    assert batch.preempted == in_order[-1:]
    waits = with_priority(in_order[-1].priority - 1)
    batch.add(waits)
    assert batch.waiting == [waits, in_order[-1]]


def test_a_request_whose_draw_a_drafter_sees_keeps_its_blocks():
    """Drawn anew with the same noise, its tokens could be biased by whoever has seen them."""
    batch = Batch(blocks=6)
    first, second, third = fill(batch, 1, 1, 2)
    third.num_in_flight, third.is_announced = 1, True
    assert batch.cache.allocate(1)  # one is left, for two
    assert batch.step() == [first]
    assert batch.preempted == [second]
    assert batch.running == [first, third]


def test_a_request_gives_its_own_blocks_if_all_draws_are_seen():
    batch = Batch(blocks=6)
    first, second, third = fill(batch, 1, 1, 2)
    for one in (second, third):
        one.num_in_flight, one.is_announced = 1, True
    assert batch.cache.allocate(2)  # nothing is left
    assert batch.step() == []
    assert batch.preempted == [first]


def test_a_preempted_request_keeps_its_tokens_and_is_recomputed():
    batch = Batch(blocks=4)
    first, second = fill(batch, 1, 2)
    give_drafts(second, [1, 2])
    started = second.started
    batch.step()
    assert batch.preempted == [second]
    assert (second.blocks, second.num_computed, second.drafts) == ([], 0, None)
    assert second.tokens == [*range(2 * BLOCK_SIZE), 99]
    batch.scheduler.remove(first)
    (work,) = batch.schedule()
    assert (work.request, work.start, work.tokens, work.samples) == (second, 0, second.tokens, True)
    assert (second.is_decoding, work.num_logit_rows, second.started) == (False, 1, started)
    batch.run([work])
    assert second.is_decoding
    assert second.tokens == [*range(2 * BLOCK_SIZE), 99, 99]


def test_a_preempted_request_precedes_those_that_never_ran():
    batch = Batch(blocks=4, max_num_seqs=2)
    _, second = fill(batch, 1, 2)
    third = request()
    batch.add(third)
    batch.step()
    assert batch.waiting == [second, third]


def test_preempted_requests_wait_in_the_order_in_which_they_came():
    batch = Batch(blocks=5)
    first, second, third = fill(batch, 1, 1, 1)
    while len(batch.preempted) < 2:
        batch.step(lambda one: one is first)
    assert batch.preempted == [third, second]
    assert batch.waiting == [second, third]


def test_a_request_that_has_nobody_behind_it_waits_itself():
    batch = Batch(blocks=3)
    first, second = fill(batch, 1, 1)
    batch.step(lambda one: one is first)
    assert batch.step(lambda one: one is second) == []
    assert batch.preempted == [second]
    assert batch.running == [first]


def test_nobody_is_admitted_in_the_step_that_preempts():
    batch = Batch(blocks=6, max_num_seqs=4)
    fill(batch, 1, 1, 2)
    batch.preempted.clear()
    batch.add(request(1))
    assert len(batch.step()) == 2
    assert len(batch.waiting) == 2


def test_a_request_in_the_middle_of_its_prompt_can_be_preempted():
    batch = Batch(blocks=5, max_prefill_rows=1)
    first, second = request(1, 100), request(3 * BLOCK_SIZE)
    batch.add(first, second)
    while not batch.preempted:
        assert not second.is_decoding
        batch.step()
    assert batch.preempted == [second]
    assert (second.blocks, second.num_computed) == ([], 0)


def test_a_request_of_full_length_alone_always_goes_on():
    batch = Batch(blocks=4)
    one, late = request(BLOCK_SIZE, 3 * BLOCK_SIZE), request(BLOCK_SIZE)
    batch.add(one, late)
    while len(one.tokens) < one.max_length:
        if one.is_decoding:
            give_drafts(one, [1] * one.num_drafts_wanted)
        assert one in batch.step()


@pytest.mark.parametrize("chosen", [0, 4])
def test_the_room_of_drafts_ignores_the_choice_for_others(chosen):
    """Requests of one seed have equal drafts: the choice for one may depend on the value of the other's first draft."""
    batch = Batch(blocks=3)
    first, second = batch.start(BLOCK_SIZE - 2, BLOCK_SIZE - 2)
    for one in (first, second):
        give_drafts(one, [1, 2, 3, 4])
    works = batch.scheduler.schedule(lambda _: True, choose=lambda _: {first: chosen, second: 4})
    assert [work.num_drafts for work in works] == [chosen, 1]
