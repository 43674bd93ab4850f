"""Which requests run and which rows a step computes."""

from __future__ import annotations

import pytest
import torch

from draftwire.config import build_sampling_params, resolve_sampling_params
from draftwire.errors import QueueFullError
from draftwire.kv_cache import BLOCK_SIZE, BlockPool
from verifier_service.output import OutputBuilder
from verifier_service.request import NoiseKeys, ReadyDrafts, Request
from verifier_service.scheduler import Scheduler


def request(prompt_length: int = 4, max_tokens: int = 8) -> Request:
    params = resolve_sampling_params(build_sampling_params(max_tokens=max_tokens))
    return Request(
        request_id="r",
        prompt=list(range(prompt_length)),
        params=params,
        num_speculative_tokens=4,
        keys=NoiseKeys(1, 2, 3),
        output=OutputBuilder(params, frozenset(), None),
        max_length=prompt_length + max_tokens,
    )


def scheduler(blocks: int = 100, max_num_seqs: int = 4, max_queue: int = 2, max_prefill_rows: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks + 1), max_num_seqs, max_queue, max_prefill_rows)


def decoding(length: int = 4) -> Request:
    """A request that has drawn its first token."""
    made = request(length)
    made.num_computed = length
    made.tokens.append(99)
    return made


def drafts(committed_length: int, last_token: int, tokens: list[int]) -> ReadyDrafts:
    return ReadyDrafts(committed_length, last_token, torch.tensor(tokens, dtype=torch.int32), None, None, "head")


def add(own: Scheduler, *requests: Request) -> None:
    for one in requests:
        own.add(one)


def test_requests_run_in_order_up_to_the_number_that_run_at_once():
    own = scheduler(max_num_seqs=2)
    requests = [request() for _ in range(4)]
    add(own, *requests)
    assert own.running == requests[:2]
    assert list(own.waiting) == requests[2:]
    own.remove(requests[0])
    assert own.running == requests[1:3]
    assert [one.started is not None for one in requests] == [True, True, True, False]


def test_full_queue_refuses_the_next_request():
    own = scheduler(max_num_seqs=1, max_queue=1)
    requests = [request(), request()]
    add(own, *requests)
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        own.add(request())
    assert [*own.running, *own.waiting] == requests


def test_without_a_queue_a_request_that_can_run_at_once_is_taken():
    own = scheduler(max_num_seqs=1, max_queue=0)
    own.add(request())
    assert len(own.running) == 1
    with pytest.raises(QueueFullError, match="0 requests are waiting"):
        own.add(request())


def test_request_runs_when_its_longest_output_has_blocks():
    own = scheduler(blocks=3)
    first, second = request(4, 2 * BLOCK_SIZE - 4), request(4, 2 * BLOCK_SIZE - 4)
    add(own, first, second)
    assert own.running == [first]
    assert len(first.blocks) == 2
    own.remove(first)
    assert first.blocks == []
    assert own.running == [second]


def test_request_that_waits_for_blocks_is_not_overtaken():
    own = scheduler(blocks=3)
    first, large, small = request(4, 2 * BLOCK_SIZE - 4), request(4, 2 * BLOCK_SIZE - 4), request(4, 4)
    add(own, first, large, small)
    assert own.running == [first]


def test_waiting_request_can_be_removed():
    own = scheduler(max_num_seqs=1)
    first, second = request(), request()
    add(own, first, second)
    own.remove(second)
    assert own.running == [first]
    assert not own.waiting


def test_prompts_are_computed_in_pieces_that_share_the_rows_of_a_step():
    own = scheduler(max_prefill_rows=8)
    first, second = request(12), request(3)
    add(own, first, second)
    (work,) = own.schedule(lambda _: True)
    assert (work.start, work.tokens, work.samples, work.num_logit_rows) == (0, list(range(8)), False, 0)
    first.num_computed = 8
    rest, other = own.schedule(lambda _: True)
    assert (rest.start, rest.tokens, rest.samples, rest.num_logit_rows) == (8, [8, 9, 10, 11], True, 1)
    assert (other.start, other.tokens, other.samples) == (0, [0, 1, 2], True)


def test_decoding_request_brings_its_last_token_and_its_drafts():
    own = scheduler()
    one = decoding(4)
    own.add(one)
    one.drafts = drafts(5, 99, [7, 8])
    (work,) = own.schedule(lambda _: True)
    assert (work.start, work.tokens, work.num_drafts, work.num_logit_rows) == (4, [99, 7, 8], 2, 3)
    assert one.drafts is None


@pytest.mark.parametrize(("length", "last"), [(4, 99), (6, 99), (5, 98)])
def test_drafts_that_continue_something_else_are_dropped(length, last):
    own = scheduler()
    one = decoding(4)
    own.add(one)
    one.drafts = drafts(length, last, [7, 8])
    (work,) = own.schedule(lambda _: True)
    assert (work.tokens, work.drafts, work.num_logit_rows) == ([99], None, 1)


def test_request_that_waits_for_drafts_holds_up_nobody():
    own = scheduler()
    waiting, ready = decoding(), decoding()
    add(own, waiting, ready)
    assert [work.request for work in own.schedule(lambda one: one is ready)] == [ready]


def test_prompts_never_take_the_rows_of_decoding_requests():
    own = scheduler(max_prefill_rows=2)
    one, new = decoding(), request(6)
    add(own, one, new)
    assert [(work.request, len(work.tokens)) for work in own.schedule(lambda _: True)] == [(one, 1), (new, 2)]
