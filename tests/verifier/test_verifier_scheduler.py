"""Which requests run, which rows a step computes, and which blocks requests get."""

from __future__ import annotations

import pytest
from scheduler_scene import Batch, give_drafts, request

from draftwire.contract.errors import QueueFullError
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import generate_pb2
from verifier_service.core.request import Request


def test_requests_run_in_order_up_to_the_number_that_run_at_once():
    batch = Batch(max_num_seqs=2)
    requests = [request() for _ in range(4)]
    batch.add(*requests)
    assert batch.step() == requests[:2]
    assert (batch.running, batch.waiting) == (requests[:2], requests[2:])
    batch.scheduler.remove(requests[0])
    assert batch.step() == requests[1:3]
    assert [one.started is not None for one in requests] == [True, True, True, False]


def test_requests_are_admitted_by_priority_then_arrival():
    batch = Batch(max_num_seqs=2, max_queue=4)
    requests = [request(priority=priority) for priority in (5, 0, 5, -1, 0)]
    batch.add(*requests)
    in_order = [requests[place] for place in (3, 1, 4, 0, 2)]
    assert batch.waiting == in_order
    assert batch.step() == in_order[:2]
    late = request(priority=-2)
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


def test_waiting_requests_with_a_place_are_counted():
    batch = Batch(max_num_seqs=3, max_queue=4)
    batch.add(*(request() for _ in range(5)))
    assert batch.scheduler.num_admissible == 3
    batch.step()
    assert batch.scheduler.num_admissible == 0
    batch.scheduler.remove(batch.running[0])
    assert batch.scheduler.num_admissible == 1


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


def outputs(count: int, prompt_length: int) -> list[Request]:
    leader = request(prompt_length)
    others = [request(prompt_length) for _ in range(count - 1)]
    for one in others:
        one.leader = leader
    return [leader, *others]


def test_outputs_wait_for_the_prompt_and_share_its_blocks():
    batch = Batch(prefix_caching=True, max_num_seqs=5, max_queue=9, max_prefill_rows=2 * BLOCK_SIZE)
    leader, second, third = outputs(3, 3 * BLOCK_SIZE + 5)
    behind = request(3)
    batch.add(leader, second, third, behind)
    assert batch.step() == [leader]
    assert batch.step() == [leader, behind]  # requests behind them in the queue do not wait
    assert batch.waiting == [second, third]
    assert batch.scheduler.may_admit is False
    leader.first_token = 1.0
    assert batch.step() == [leader, behind, second, third]
    assert [one.num_prefix_hits for one in (leader, second, third)] == [0, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert second.blocks[:3] == third.blocks[:3] == leader.blocks[:3]
    assert not {*second.blocks[3:]} & {*third.blocks[3:], *leader.blocks}


@pytest.mark.parametrize("prompt_length", [BLOCK_SIZE, 3 * BLOCK_SIZE])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_outputs_wait_only_where_blocks_can_be_shared(prompt_length, prefix_caching):
    batch = Batch(prefix_caching=prefix_caching)
    both = outputs(2, prompt_length)
    batch.add(*both)
    assert batch.step() == (both[:1] if prefix_caching and prompt_length > BLOCK_SIZE else both)


def test_outputs_do_not_wait_for_one_that_has_left():
    batch = Batch(prefix_caching=True, max_prefill_rows=BLOCK_SIZE)
    leader, second = outputs(2, 3 * BLOCK_SIZE)
    batch.add(leader, second)
    assert batch.step() == [leader]
    batch.scheduler.remove(leader)
    assert batch.step() == [second]


def test_outputs_are_queued_all_or_none():
    batch = Batch(max_num_seqs=1, max_queue=2)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        batch.scheduler.add(*outputs(4, 5))
    assert batch.waiting == []
    three = outputs(3, 5)
    batch.scheduler.add(*three)
    assert batch.waiting == three


PROMPT = [5 * i % 37 for i in range(3 * BLOCK_SIZE)]


def finish(batch: Batch, one: Request) -> None:
    """Run a request until it has all its tokens, and remove it."""
    batch.add(one)
    while len(one.tokens) < one.max_length:
        batch.step()
    batch.scheduler.remove(one)


def start_of(batch: Batch, prompt: list[int], max_tokens: int = 8) -> int:
    """Run a step of a new request; return its first computed row."""
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
    batch.run(batch.schedule(), num_accepted=0)  # draft rows fill the block
    assert one.tokens == [*range(BLOCK_SIZE - 2), 99, 99]
    for _ in range(steps):
        batch.step()  # the drawn token's row overwrites the draft's
    assert start_of(batch, [*range(BLOCK_SIZE - 2), 99, last, 1]) == (BLOCK_SIZE if steps and last == 99 else 0)


def test_tokens_cut_off_at_the_end_are_not_found():
    batch = Batch(prefix_caching=True)
    (one,) = batch.start(BLOCK_SIZE - 2)
    give_drafts(one, [5, 6, 7])
    batch.run(batch.schedule(), num_accepted=3)
    del one.tokens[BLOCK_SIZE - 1 :]  # the first drawn token was a stop token
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
