"""The scheduler's invariants under seeded random arrivals, drafts and ends."""

from __future__ import annotations

import random

import pytest
from scheduler_scene import Batch, give_drafts, request

from draftwire.model.block_pool import blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request


class Chance:
    """Requests that come, wait for drafts, decode, are cancelled and end, as a seeded generator wants it."""

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
        self.order: list[Request] = []  # those that have not ended, as they came
        self.rows: dict[int, tuple[int, ...]] = {}  # slot: the tokens up to that of the row that was written to it

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
        """The rows of `work` are written to the cache."""
        tokens = [*work.request.tokens[: work.start], *work.tokens]
        for row in range(work.start, len(tokens)):
            self.rows[self.slot(work.request, row)] = tuple(tokens[: row + 1])

    def slot(self, one: Request, row: int) -> int:
        return one.blocks[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE

    def check_blocks(self) -> None:
        """Requests are served in order, and a block has several users only where they share computed rows."""
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
        """Works are the next rows of running requests, fit into their blocks, and include the oldest's."""
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
