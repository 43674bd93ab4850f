"""Rows that are in the cache already are not computed again."""

from __future__ import annotations

import pytest
from scheduler_scene import Batch, give_drafts, request

from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.request import Request

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
