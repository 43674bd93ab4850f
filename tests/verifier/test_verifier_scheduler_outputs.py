"""Several outputs of one prompt in the queue: they wait for its blocks, and are queued all or none."""

from __future__ import annotations

import pytest
from scheduler_scene import Batch, request

from draftwire.contract.errors import QueueFullError
from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.core.request import Request


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
