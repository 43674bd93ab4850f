"""Which requests run and which rows a step computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftwire.contract.errors import QueueFullError
from draftwire.contract.validation import build_sampling_params, resolve_sampling_params
from draftwire.model.block_pool import blocks_for
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import NoiseKeys, ReadyDrafts, Request
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.scheduler import Scheduler

Ready = Callable[[Request], bool]


def request(prompt_length: int = 4, max_tokens: int = 8, prompt: list[int] | None = None) -> Request:
    prompt = list(range(prompt_length)) if prompt is None else prompt
    params = resolve_sampling_params(build_sampling_params(max_tokens=max_tokens))
    return Request(
        request_id="r",
        prompt=prompt,
        params=params,
        num_speculative_tokens=4,
        keys=NoiseKeys(1, 2, 3),
        stops=StopConditions(params, frozenset()),
        max_length=len(prompt) + max_tokens,
    )


def give_drafts(one: Request, tokens: list[int], length_off: int = 0, last_off: int = 0) -> None:
    """Drafts arrive for a request; with an offset, for something that it is not."""
    committed, last = len(one.tokens) + length_off, one.tokens[-1] + last_off
    one.drafts = ReadyDrafts(committed, last, tokens)


@dataclass
class Batch:
    """A scheduler, and the engine played by hand."""

    blocks: int = 100
    max_num_seqs: int = 4
    max_queue: int = 2
    max_prefill_rows: int = 1000
    prefix_caching: bool = False
    preempted: list[Request] = field(default_factory=list)
    useless: set[int] = field(default_factory=set)  # blocks that are of no use to any request

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.blocks + 1, is_enabled=self.prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            self.max_num_seqs,
            self.max_queue,
            self.max_prefill_rows,
            self.preempted.append,
            lambda _, block: block not in self.useless,
        )

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler.waiting)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)

    def schedule(self, is_ready: Ready = lambda _: True) -> list[ScheduledRows]:
        return self.scheduler.schedule(is_ready)

    def run(self, works: list[ScheduledRows], num_accepted: int = 0) -> None:
        """The rows of `works` run; each request that draws accepts so many drafts and draws 99."""
        for work in works:
            one = work.request
            accepted = [] if work.drafts is None else work.drafts.tokens[:num_accepted]
            one.num_computed = work.start + len(work.tokens) - work.num_drafts + len(accepted)
            if work.samples:
                one.tokens += [*accepted, 99]

    def step(self, is_ready: Ready = lambda _: True) -> list[Request]:
        """One step without drafts; the requests that it computed."""
        works = self.schedule(is_ready)
        self.run(works)
        return [work.request for work in works]

    def start(self, *prompt_lengths: int, max_tokens: int = 100) -> list[Request]:
        """Requests that have drawn their first token."""
        requests = [request(length, max_tokens) for length in prompt_lengths]
        self.add(*requests)
        self.step()
        assert all(one.is_decoding for one in requests)
        return requests


# The queue.


def test_requests_run_in_order_up_to_the_number_that_run_at_once():
    batch = Batch(max_num_seqs=2)
    requests = [request() for _ in range(4)]
    batch.add(*requests)
    assert batch.step() == requests[:2]
    assert (batch.running, batch.waiting) == (requests[:2], requests[2:])
    batch.scheduler.remove(requests[0])
    assert batch.step() == requests[1:3]
    assert [one.started is not None for one in requests] == [True, True, True, False]


def with_priority(priority: int, **options: Any) -> Request:
    one = request(**options)
    one.priority = priority
    return one


def test_requests_are_admitted_by_priority_then_arrival():
    batch = Batch(max_num_seqs=2, max_queue=4)
    requests = [with_priority(priority) for priority in (5, 0, 5, -1, 0)]
    batch.add(*requests)
    in_order = [requests[place] for place in (3, 1, 4, 0, 2)]
    assert batch.waiting == in_order
    assert batch.step() == in_order[:2]
    late = with_priority(-2)
    batch.add(late)
    assert batch.step() == in_order[:2]  # a request that runs is not preempted for one that waits
    assert batch.waiting == [late, *in_order[2:]]
    batch.scheduler.remove(in_order[0])
    assert batch.step() == [in_order[1], late]


def test_full_queue_refuses_the_next_request():
    batch = Batch(max_num_seqs=1, max_queue=1)
    requests = [request(), request()]
    batch.add(*requests)
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        batch.add(request())
    assert batch.waiting == requests
    batch.step()
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        batch.add(request())


def test_without_a_queue_a_request_that_has_a_place_is_taken():
    batch = Batch(max_num_seqs=1, max_queue=0)
    batch.add(request())
    with pytest.raises(QueueFullError, match="0 requests are waiting"):
        batch.add(request())


def test_waiting_request_can_be_removed():
    batch = Batch(max_num_seqs=1)
    first, second = request(), request()
    batch.add(first, second)
    batch.step()
    batch.scheduler.remove(second)
    assert (batch.running, batch.waiting) == ([first], [])


# The rows of a step.


def test_prompts_in_pieces_share_the_rows_of_a_step():
    batch = Batch(max_prefill_rows=8)
    first, second = request(12), request(3)
    batch.add(first, second)
    (work,) = batch.schedule()
    assert (work.start, work.tokens, work.samples, work.num_logit_rows) == (0, list(range(8)), False, 0)
    assert batch.waiting == [second]
    batch.run([work])
    rest, other = batch.schedule()
    assert (rest.start, rest.tokens, rest.samples, rest.num_logit_rows) == (8, [8, 9, 10, 11], True, 1)
    assert (other.start, other.tokens, other.samples) == (0, [0, 1, 2], True)


def test_decoding_request_brings_its_last_token_and_its_drafts():
    batch = Batch()
    (one,) = batch.start(4)
    give_drafts(one, [7, 8])
    (work,) = batch.schedule()
    assert (work.start, work.tokens, work.num_drafts, work.num_logit_rows) == (4, [99, 7, 8], 2, 3)
    assert one.drafts is None


@pytest.mark.parametrize(("length_off", "last_off"), [(-1, 0), (1, 0), (0, -1)])
def test_drafts_that_continue_something_else_are_dropped(length_off, last_off):
    batch = Batch()
    (one,) = batch.start(4)
    give_drafts(one, [7, 8], length_off, last_off)
    (work,) = batch.schedule()
    assert (work.tokens, work.drafts, work.num_logit_rows) == ([99], None, 1)


def test_request_that_waits_for_drafts_holds_up_nobody():
    batch = Batch()
    _, ready = batch.start(4, 4)
    assert batch.step(lambda one: one is ready) == [ready]


def test_decoding_rows_come_first_and_are_not_prompt_rows():
    batch = Batch(max_prefill_rows=6)
    one, other = batch.start(2, 3)
    new = request(20)
    batch.add(new)
    assert [(work.request, len(work.tokens)) for work in batch.schedule()] == [(one, 1), (other, 1), (new, 6)]


# Blocks.


def test_request_gets_blocks_for_its_prompt_and_then_as_it_grows():
    batch = Batch()
    (one,) = batch.start(2 * BLOCK_SIZE - 1)
    assert len(one.blocks) == 2
    batch.step()
    assert (len(one.tokens), len(one.blocks)) == (2 * BLOCK_SIZE + 1, 2)
    batch.step()
    assert len(one.blocks) == 3
    batch.scheduler.remove(one)
    assert (one.blocks, batch.cache.num_free) == ([], batch.blocks)


def test_a_request_needs_its_prompt_and_a_block_for_each_running():
    batch = Batch(blocks=4)
    first, second = request(2 * BLOCK_SIZE), request(2 * BLOCK_SIZE)
    batch.add(first, second)
    batch.step()
    assert (batch.running, batch.waiting) == ([first], [second])
    small = Batch(blocks=5)
    small.add(request(2 * BLOCK_SIZE), request(2 * BLOCK_SIZE))
    small.step()
    assert len(small.running) == 2


def test_request_that_waits_for_blocks_is_not_overtaken():
    batch = Batch(blocks=4)
    batch.add(request(3 * BLOCK_SIZE), request(2 * BLOCK_SIZE), request(1))
    assert len(batch.step()) == 1
    assert len(batch.waiting) == 2


def test_draft_rows_get_blocks_that_are_free():
    batch = Batch()
    (one,) = batch.start(BLOCK_SIZE - 1)
    give_drafts(one, [5, 6, 7])
    (work,) = batch.schedule()
    assert (work.tokens, len(one.blocks)) == ([99, 5, 6, 7], 2)


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_drafts_without_room_are_not_verified(fitting):
    batch = Batch(blocks=1)
    (one,) = batch.start(BLOCK_SIZE - 1 - fitting)
    give_drafts(one, [5, 6, 7])
    (work,) = batch.schedule()
    assert work.tokens == [99, 5, 6, 7][: 1 + fitting]
    assert (work.num_drafts, work.num_logit_rows) == (fitting, 1 + fitting)
    assert (work.drafts is None) == (work.cause == generate_pb2.FALLBACK_CAUSE_KV_CACHE) == (fitting == 0)
    assert not batch.preempted


def test_former_draft_blocks_are_taken_back_before_preemption():
    batch = Batch(blocks=4)
    drafting, growing = batch.start(BLOCK_SIZE - 2, BLOCK_SIZE - 2)
    give_drafts(drafting, [5, 6, 7])
    give_drafts(growing, [5, 6, 7])
    batch.run(batch.schedule(lambda one: one is drafting))
    batch.run(batch.schedule(lambda one: one is growing), num_accepted=3)
    assert [len(one.blocks) for one in (drafting, growing)] == [2, 2]
    assert batch.cache.num_free == 0
    while len(growing.tokens) <= 2 * BLOCK_SIZE:
        batch.step(lambda one: one is growing)
    assert batch.step(lambda one: one is growing) == [growing]
    assert [len(one.blocks) for one in (drafting, growing)] == [1, 3]
    assert not batch.preempted


# Preemption.


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


# Rows that are in the cache already.


PROMPT = [5 * i % 37 for i in range(3 * BLOCK_SIZE)]


def finish(batch: Batch, one: Request) -> None:
    """Runs a request until it has all its tokens, and ends it."""
    batch.add(one)
    while len(one.tokens) < one.max_length:
        batch.step()
    batch.scheduler.remove(one)


def start_of(batch: Batch, prompt: list[int], max_tokens: int = 8) -> int:
    """The first row that is computed of a request that comes now, and runs."""
    one = request(prompt=prompt, max_tokens=max_tokens)
    batch.add(one)
    (work,) = [work for work in batch.schedule() if work.request is one]
    batch.run([work])
    assert (one.num_reused, one.num_prefix_hits) == (work.start, work.start)
    return work.start


def test_full_blocks_of_a_computed_prefix_are_not_recomputed():
    batch = Batch(prefix_caching=True)
    finish(batch, request(prompt=PROMPT))
    assert start_of(batch, [*PROMPT[: 2 * BLOCK_SIZE + 5], 99, 98]) == 2 * BLOCK_SIZE
    assert start_of(batch, [98, *PROMPT]) == 0
    assert batch.scheduler.num_reused_rows == 2 * BLOCK_SIZE


def test_blocks_of_no_use_are_computed_again_and_found_then():
    batch = Batch(prefix_caching=True)
    one = request(prompt=PROMPT)
    batch.add(one)
    batch.run(batch.schedule())
    batch.useless.add(one.blocks[1])
    batch.scheduler.remove(one)
    assert start_of(batch, PROMPT) == BLOCK_SIZE
    batch.scheduler.remove(batch.running[0])
    assert start_of(batch, PROMPT) == 2 * BLOCK_SIZE


def test_the_last_token_of_a_prompt_always_runs():
    batch = Batch(prefix_caching=True)
    finish(batch, request(prompt=PROMPT))
    assert start_of(batch, PROMPT[: 2 * BLOCK_SIZE]) == BLOCK_SIZE
    assert start_of(batch, PROMPT[: 2 * BLOCK_SIZE + 1]) == 2 * BLOCK_SIZE


def test_generated_tokens_are_found_too():
    batch = Batch(prefix_caching=True)
    one = request(prompt=PROMPT, max_tokens=BLOCK_SIZE + 1)
    finish(batch, one)
    assert start_of(batch, [*one.tokens, 1]) == 4 * BLOCK_SIZE
    other = request(prompt=PROMPT, max_tokens=BLOCK_SIZE)
    again = Batch(prefix_caching=True)
    finish(again, other)
    assert start_of(again, [*other.tokens, 1, 2]) == 3 * BLOCK_SIZE, "its last token has not run"


def test_simultaneous_rows_are_found_from_the_next_step_on():
    batch = Batch(prefix_caching=True, max_prefill_rows=2 * BLOCK_SIZE)
    first, second = request(prompt=PROMPT), request(prompt=PROMPT)
    batch.add(first, second)
    batch.step()
    batch.step()
    assert (first.is_decoding, second.num_reused) == (True, 2 * BLOCK_SIZE)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("last", [5, 99])
def test_rows_of_refused_drafts_are_never_found(last, steps):
    batch = Batch(prefix_caching=True)
    (one,) = batch.start(BLOCK_SIZE - 2)
    give_drafts(one, [5, 6, 7])
    batch.run(batch.schedule(), num_accepted=0)  # rows of drafts have filled the block
    assert one.tokens == [*range(BLOCK_SIZE - 2), 99, 99]
    for _ in range(steps):
        batch.step()  # the row of the drawn token has taken the draft's place
    assert start_of(batch, [*range(BLOCK_SIZE - 2), 99, last, 1]) == (BLOCK_SIZE if steps and last == 99 else 0)


def test_tokens_cut_off_at_the_end_are_not_found():
    batch = Batch(prefix_caching=True)
    (one,) = batch.start(BLOCK_SIZE - 2)
    give_drafts(one, [5, 6, 7])
    batch.run(batch.schedule(), num_accepted=3)
    del one.tokens[BLOCK_SIZE - 1 :]  # a stop token was the first drawn
    batch.scheduler.remove(one)
    assert start_of(batch, [*range(BLOCK_SIZE - 2), 99, 5, 6, 7]) == 0


def test_rows_of_a_failed_request_are_not_found():
    batch = Batch(prefix_caching=True)
    one = request(prompt=PROMPT)
    batch.add(one)
    batch.step()
    batch.step()
    batch.scheduler.remove(one, has_failed=True)
    assert start_of(batch, PROMPT) == 0


def test_shared_blocks_are_counted_once():
    batch = Batch(blocks=5, prefix_caching=True)
    finish(batch, request(prompt=PROMPT, max_tokens=1))
    first, second = request(prompt=PROMPT, max_tokens=4), request(prompt=PROMPT, max_tokens=4)
    batch.add(first, second)
    batch.step()
    assert batch.running == [first, second]
    assert batch.cache.num_free == 1


def test_a_request_that_is_not_admitted_takes_no_blocks():
    batch = Batch(blocks=5, prefix_caching=True)
    finish(batch, request(prompt=PROMPT, max_tokens=1))
    one, waits = request(4, 40), request(prompt=[*PROMPT, *PROMPT[:BLOCK_SIZE]])
    batch.add(one, waits)
    batch.step()
    assert (batch.running, batch.waiting) == ([one], [waits])
    assert batch.cache.num_free == 4


def test_a_preempted_request_finds_its_unneeded_rows_again():
    batch = Batch(blocks=6, prefix_caching=True)
    first, second = request(prompt=PROMPT[:BLOCK_SIZE]), request(prompt=PROMPT[BLOCK_SIZE:])
    batch.add(first, second)
    batch.step()
    while not batch.preempted:
        batch.step(lambda one: one is first)
        first.max_length += 1
    batch.scheduler.remove(first)
    (work,) = batch.schedule()
    assert (work.request, work.start) == (second, BLOCK_SIZE), "of its two blocks the first one needed the last"
    assert (second.num_prefix_hits, second.num_preemptions) == (0, 1)


# Everything at once.


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


def test_a_request_in_flight_takes_no_part_unless_it_is_followed():
    batch = Batch()
    one, other = batch.start(4, 4)
    one.num_in_flight = other.num_in_flight = 1
    assert batch.schedule() == []
    (work,) = batch.scheduler.schedule(lambda _: True, {other: 1})
    assert (work.request, work.start, work.follows, work.is_decoding) == (other, len(other.tokens), 1, True)
    assert (len(work.tokens), work.num_logit_rows, work.num_drafts) == (1, 1, 0)


def test_the_row_of_a_token_that_is_not_known_gets_its_block():
    batch = Batch()
    (one,) = batch.start(BLOCK_SIZE - 1)
    assert len(one.tokens) == BLOCK_SIZE
    assert len(one.blocks) == 1
    one.num_in_flight = 1
    (work,) = batch.scheduler.schedule(lambda _: True, {one: 0})
    assert work.start == BLOCK_SIZE
    assert len(one.blocks) == 2


def test_blocks_of_draft_rows_in_flight_are_not_taken_back():
    batch = Batch(blocks=3)
    drafting, growing = batch.start(BLOCK_SIZE - 2, BLOCK_SIZE - 1)
    give_drafts(drafting, [7] * 4)
    (work,) = batch.schedule(lambda one: one is drafting)
    assert (work.num_drafts, len(drafting.blocks)) == (4, 2)
    drafting.num_in_flight = 1
    growing.tokens += [99] * (2 * BLOCK_SIZE)
    growing.num_computed = len(growing.tokens) - 1
    batch.schedule(lambda one: one is growing)  # needs three blocks, of which none is free
    assert len(drafting.blocks) == 2
    assert batch.preempted == [growing]


def test_a_work_of_a_request_that_was_preempted_is_not_current():
    batch = Batch(blocks=3)
    one, other = batch.start(BLOCK_SIZE - 1, 2)
    of_one, of_other = batch.schedule()
    assert of_one.is_current
    assert of_other.is_current
    other.num_in_flight = 1
    one.tokens += [99] * (2 * BLOCK_SIZE)
    one.num_computed = len(one.tokens) - 1
    batch.schedule(lambda request: request is one)  # needs all three blocks
    assert batch.preempted == [other]
    assert of_one.is_current
    assert not of_other.is_current
    assert not other.is_in_flight
    batch.scheduler.remove(one)
    assert not of_one.is_current
    (anew,) = batch.schedule()
    assert anew.request is other
    assert anew.is_current
    assert not of_other.is_current  # though the request has blocks again
