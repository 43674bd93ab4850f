"""Preemption and recomputation of requests, and invariants under random arrivals."""

from __future__ import annotations

import random

import pytest
from scheduler_scene import Batch, give_drafts, request

from draftwire.model.block_pool import blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request


def fill(batch: Batch, *lengths: int) -> list[Request]:
    """Start requests that each need a new block next, in a cache with one free block too few."""
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
    requests = [request(BLOCK_SIZE, priority=priority) for priority in priorities]
    batch.add(*requests)
    batch.step()
    in_order = sorted(requests, key=lambda one: one.priority)
    assert batch.running == in_order
    while not batch.preempted:
        batch.step()
    assert batch.preempted == in_order[-1:]
    waits = request(priority=in_order[-1].priority - 1)
    batch.add(waits)
    assert batch.waiting == [waits, in_order[-1]]


def test_a_request_whose_draw_a_drafter_sees_keeps_its_blocks():
    """A drafter that has seen the draw could bias a second draw with the same noise."""
    batch = Batch(blocks=6)
    first, second, third = fill(batch, 1, 1, 2)
    third.num_in_flight, third.is_announced = 1, True
    assert batch.cache.allocate(1)  # one block is left for two requests
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
    """Requests with one seed have equal drafts, so the choice for one could depend on another's draft values."""
    batch = Batch(blocks=3)
    first, second = batch.start(BLOCK_SIZE - 2, BLOCK_SIZE - 2)
    for one in (first, second):
        give_drafts(one, [1, 2, 3, 4])
    works = batch.scheduler.schedule(lambda _: True, choose=lambda _: {first: chosen, second: 4})
    assert [work.num_drafts for work in works] == [chosen, 1]


class Chance:
    """Requests that arrive, wait for drafts, decode, are cancelled and end, by a seeded generator."""

    def __init__(self, seed: int, prefix_caching: bool) -> None:
        self.random = random.Random(seed)
        self.longest = 8 * BLOCK_SIZE
        self.prompts = [[self.random.randrange(9) for _ in range(self.longest)] for _ in range(3)]
        self.batch = Batch(
            blocks=self.random.randint(8, 16),
            max_num_seqs=self.random.randint(4, 8),
            max_queue=100,
            max_prefill_rows=self.random.choice([7, 40, 200]),
            prefix_caching=prefix_caching,
        )
        self.order: list[Request] = []  # requests that have not ended, in order of arrival
        self.rows: dict[int, tuple[int, ...]] = {}  # by slot: all tokens up to that of the last written row

    def arrive(self) -> None:
        length = self.random.randint(1, self.longest // 2)
        prompt = self.random.choice(self.prompts)[:length]
        one = request(prompt=prompt, max_tokens=self.random.randint(1, self.longest - length))
        self.order.append(one)
        self.batch.add(one)

    def step(self) -> None:
        waits = {one for one in self.order if self.random.random() < 0.2}
        for one in self.order:
            if one.is_decoding and one not in waits:
                give_drafts(one, [self.random.choice([7, 99]) for _ in range(self.random.randint(0, 4))])
                one.drafts = one.drafts.first(one.num_drafts_wanted)
        works = self.batch.schedule(lambda one: one not in waits)
        self.check_blocks()
        self.check_rows(works, waits)
        for work in works:
            self.write(work)
            self.batch.run([work], self.random.randint(0, work.num_drafts))
        for one in list(self.order):
            if len(one.tokens) >= one.max_length or self.random.random() < 0.002:
                assert len(one.tokens) <= one.max_length
                self.order.remove(one)
                self.batch.scheduler.remove(one, has_failed=self.random.random() < 0.1)

    def write(self, work: ScheduledRows) -> None:
        """Record that the rows of `work` are written to the cache."""
        tokens = [*work.request.tokens[: work.start], *work.tokens]
        for row in range(work.start, len(tokens)):
            self.rows[self.slot(work.request, row)] = tuple(tokens[: row + 1])

    def slot(self, one: Request, row: int) -> int:
        return one.blocks[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE

    def check_blocks(self) -> None:
        """Check that requests are served in order, and share only blocks of computed rows."""
        batch = self.batch
        assert [*batch.running, *batch.waiting] == self.order
        assert len(batch.running) <= batch.max_num_seqs
        assert all(not one.blocks and one.num_computed == 0 for one in batch.waiting)
        used = {block for one in self.order for block in one.blocks}
        assert 0 not in used
        assert len(used) + batch.cache.num_free == batch.blocks
        own = [block for one in self.order for block in one.blocks[one.num_computed // BLOCK_SIZE :]]
        shared = [block for one in self.order for block in one.blocks[: one.num_computed // BLOCK_SIZE]]
        assert len(set(own)) == len(own)
        assert set(own).isdisjoint(shared), "a block is written that another request reads"
        assert batch.prefix_caching or len(set(shared)) == len(shared)
        for one in self.random.sample(batch.running, min(2, len(batch.running))):
            rows = [self.rows[self.slot(one, row)] for row in range(one.num_computed)]
            assert rows == [tuple(one.tokens[: row + 1]) for row in range(one.num_computed)]

    def check_rows(self, works: list[ScheduledRows], waits: set[Request]) -> None:
        """Check that `works` are the next rows of running requests, fit their blocks and include the oldest request."""
        batch = self.batch
        assert len({work.request for work in works}) == len(works)
        for work in works:
            one = work.request
            assert one in batch.running
            assert work.start == one.num_computed
            assert blocks_for(work.start + len(work.tokens)) <= len(one.blocks)
            assert work.tokens[: len(one.tokens) - work.start] == one.tokens[work.start : work.start + len(work.tokens)]
        prompt_rows = sum(len(work.tokens) for work in works if not work.request.is_decoding)
        assert prompt_rows <= batch.max_prefill_rows
        oldest = self.order[0] if self.order else None
        if oldest is not None and oldest not in waits:
            assert oldest in [work.request for work in works], "the oldest request starves"


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_rows_never_change_and_the_oldest_request_continues(seed, prefix_caching):
    chance = Chance(seed, prefix_caching)
    for _ in range(300):
        while len(chance.order) < 12 and chance.random.random() < 0.3:
            chance.arrive()
        chance.step()
    steps = 0
    while chance.order:
        chance.step()
        steps += 1
        assert steps < 20000
    batch = chance.batch
    assert batch.cache.num_free == batch.blocks
    assert len(set(batch.cache.allocate(batch.blocks) or [])) == batch.blocks
    assert batch.preempted, "the case is too easy"
    assert (batch.scheduler.num_reused_rows > 0) == prefix_caching
